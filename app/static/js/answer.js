/**
 * An answer: what a response has said so far. Pure: events in, a new answer out, the old one left alone.
 *
 * status   sending    made here, not yet confirmed by the server
 *          waiting    the server has it (queued, or computing its prompt)
 *          streaming  text arrives
 *          completed, incomplete (cut by a limit), cancelled (stopped), failed, unsent (the socket went first)
 * sequence number of the last event taken in, -1 before the first: what a resume asks to go on from
 * sentAt, firstAt, lastAt  milliseconds of the wall clock, null where unknown
 * timed    false once events came late, so that their times say nothing about the speed of the answer
 */

const RUNNING = new Set(["sending", "waiting", "streaming"]);
const ENDINGS = new Set(["response.completed", "response.incomplete", "response.failed"]);

export function newAnswer(key, now) {
  return {
    key,
    responseId: null,
    status: "sending",
    stopping: false,
    text: "",
    sequence: -1,
    usage: null,
    reason: null,
    problem: null,
    sentAt: now,
    firstAt: null,
    lastAt: null,
    timed: true,
  };
}

export const isRunning = (answer) => RUNNING.has(answer.status);

/** Whether a next turn may name this answer as its parent. */
export const isUsable = (answer) => answer.responseId !== null && ["completed", "incomplete", "cancelled"].includes(answer.status);

export const isEnding = (event) => ENDINGS.has(event.type);

/** How an event follows what was taken in: "next", "repeat" (to be ignored) or "gap" (something is missing). */
export function orderOf(answer, event) {
  const number = event.sequence_number;
  if (!Number.isInteger(number)) return "next";
  if (number <= answer.sequence) return "repeat";
  return number === answer.sequence + 1 ? "next" : "gap";
}

/** The answer after one of its events. Unknown types count in the sequence and change nothing else. */
export function applyEvent(answer, event, now) {
  const next = { ...answer };
  if (Number.isInteger(event.sequence_number)) next.sequence = event.sequence_number;
  switch (event.type) {
    case "response.created":
    case "response.queued":
    case "response.in_progress":
      next.responseId = event.response.id;
      if (next.status === "sending") next.status = "waiting";
      return next;
    case "response.output_text.delta":
      next.text += event.delta;
      next.status = "streaming";
      next.firstAt ??= now;
      next.lastAt = now;
      return next;
    case "response.output_text.done":
      next.text = event.text;
      return next;
    default:
      return isEnding(event) ? applyResponse(next, event.response) : next;
  }
}

/** The answer as a finished response object tells it (an ending event, or GET /v1/responses/{id}). */
export function applyResponse(answer, response) {
  const next = { ...answer, responseId: response.id, status: response.status, stopping: false };
  const text = outputText(response);
  if (text || response.status === "completed") next.text = text;
  next.usage = usageOf(response.usage);
  next.reason = response.incomplete_details?.reason ?? null;
  next.problem = response.status === "failed" ? (response.error ?? { message: "The answer failed.", code: null }) : null;
  return next;
}

/** The answer after a break in which events may have been missed: their times are lost, the text is not. */
export function breakTiming(answer) {
  return { ...answer, timed: false, sentAt: answer.firstAt === null ? null : answer.sentAt };
}

/** The answer ended without a response of its own: refused, lost, or never sent. */
export function failAnswer(answer, problem, status = "failed") {
  return { ...answer, status, stopping: false, problem };
}

function outputText(response) {
  let text = "";
  for (const item of response.output ?? []) {
    if (item.type !== "message") continue;
    for (const part of item.content ?? []) if (part.type === "output_text") text += part.text;
  }
  return text;
}

function usageOf(usage) {
  if (!usage) return null;
  return {
    inputTokens: usage.input_tokens,
    sharedTokens: usage.input_tokens_details?.cached_tokens ?? 0,
    outputTokens: usage.output_tokens,
  };
}

/** { ttftMs, tokensPerSecond, sharedTokens, inputTokens, outputTokens }; null where a number is not known. */
export function measuresOf(answer) {
  const { usage, firstAt, lastAt, sentAt, timed } = answer;
  const spanMs = firstAt === null ? 0 : lastAt - firstAt;
  // The first token's time is the TTFT; the rate is that of the ones after it.
  const rated = timed && usage !== null && usage.outputTokens > 1 && spanMs > 0;
  return {
    ttftMs: firstAt !== null && sentAt !== null ? firstAt - sentAt : null,
    tokensPerSecond: rated ? ((usage.outputTokens - 1) * 1000) / spanMs : null,
    sharedTokens: usage?.sharedTokens ?? null,
    inputTokens: usage?.inputTokens ?? null,
    outputTokens: usage?.outputTokens ?? null,
  };
}
