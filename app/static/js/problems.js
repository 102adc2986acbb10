/** What went wrong, in a sentence for the person at the page. A problem is { message, code }, as OpenAI's envelope has it. */

const SENTENCES = {
  concurrency_limit_exceeded: "Too many answers are being written at once. Wait for one to end and try again.",
  context_length_exceeded: "This chat is longer than the model can read. Start a new chat, or shorten the message.",
  engine_unavailable: "The engine is restarting. Try again in a moment.",
  insufficient_quota: "Today's budget is used up. Try again tomorrow.",
  model_not_found: "The server no longer serves this assistant. Start a new chat with another one.",
  previous_response_not_found: "The server no longer holds this chat, so it cannot go on. Start a new chat.",
  prompt_not_found: "The server no longer has this assistant. Start a new chat with another one.",
  rate_limit_exceeded: "Too many messages for now. Wait a little and try again.",
  response_in_progress: "The answer before this one is still being written. Wait for it, or stop it first.",
  response_not_found: "The server no longer holds this answer.",
};

export const UNSENT = {
  code: "unsent",
  message: "The connection broke before the server confirmed this message. It may or may not have arrived.",
};

export const TOO_LONG = { code: "too_long", message: "This message is too long to send. Please shorten it." };

/** The sentence to show, and the server's own words where they say more. */
export function describe(problem) {
  const known = SENTENCES[problem.code];
  const detail = known && problem.message ? problem.message : null;
  return { sentence: known ?? problem.message ?? "Something went wrong.", detail };
}

/** The problem in an error event (nested as in our gateway, or flat as in OpenAI's stream). */
export function problemOf(event) {
  const { message, code } = event.error ?? event;
  return { message: String(message ?? "The server reported an error."), code: code ?? null };
}
