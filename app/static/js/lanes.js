/**
 * The answers under way: one lane (`stream_id`) each. Starts them, takes their events in, goes on after a break.
 *
 * After a break each answer is resumed from its last number. Where the socket cannot do that (the server holds no log of
 * it any more), its stored response is fetched instead. An answer that the server never confirmed is not sent again by
 * itself: it may be running already.
 */

import { applyEvent, applyResponse, breakTiming, failAnswer, isEnding, isRunning, orderOf } from "./answer.js";
import { problemOf, UNSENT } from "./problems.js";

const FETCH_PAUSE_MS = 1000;

export class Lanes {
  #lanes = new Map(); // stream_id -> lane
  #cancels = new Set(); // response ids that were asked to stop and have not said that they did
  #connection;
  #api;
  #book;

  /**
   * `book.read(lane)` gives the lane's answer (null once its turn is gone), `book.write(lane, answer)` takes the new one,
   * `book.notice(problem)` shows what belongs to no answer.
   */
  constructor({ connection, api, book }) {
    this.#connection = connection;
    this.#api = api;
    this.#book = book;
  }

  /** Sends `request` (a response.create without its stream_id) as soon as the socket is open. */
  begin(place, request) {
    const lane = { ...place, request, sent: false, resuming: false, fetching: false };
    this.#lanes.set(lane.key, lane);
    this.#send(lane);
  }

  /** Takes up an answer that another page of this browser began: the one before a reload. */
  adopt(place) {
    if (this.#lanes.has(place.key)) return;
    const lane = { ...place, request: null, sent: true, resuming: false, fetching: false };
    const answer = this.#book.read(lane);
    if (answer.responseId === null) {
      this.#book.write(lane, failAnswer(answer, UNSENT, "unsent"));
      return;
    }
    this.#lanes.set(lane.key, lane);
    this.#book.write(lane, breakTiming(answer));
    if (this.#connection.status === "open") this.#resume(lane);
  }

  /** Whether the answer is under way in this page. */
  has(key) {
    return this.#lanes.has(key);
  }

  stop(key) {
    const lane = this.#lanes.get(key);
    const answer = lane && this.#book.read(lane);
    if (!answer) return;
    if (!lane.sent) {
      this.#end(lane, { ...answer, status: "cancelled" });
      return;
    }
    this.#book.write(lane, { ...answer, stopping: true });
    if (answer.responseId !== null) this.#cancel(answer.responseId);
  }

  onStatus(status) {
    for (const lane of [...this.#lanes.values()]) {
      const answer = this.#book.read(lane);
      if (answer === null) this.#lanes.delete(lane.key);
      else if (status === "open") lane.sent ? this.#resume(lane) : this.#send(lane);
      else if (status !== "connecting" && lane.sent) this.#lost(lane, answer);
    }
  }

  onEvent(event) {
    const lane = this.#lanes.get(event.stream_id);
    if (event.type === "error") {
      this.#onError(lane, event);
      return;
    }
    const answer = lane && this.#book.read(lane);
    if (!answer) return;
    const order = orderOf(answer, event);
    if (order === "repeat") return;
    if (order === "gap") {
      if (!lane.resuming) this.#resume(lane);
      return;
    }
    lane.resuming = false;
    const next = applyEvent(answer, event, Date.now());
    if (isEnding(event)) {
      this.#end(lane, next);
      return;
    }
    this.#book.write(lane, next);
    if (next.stopping && answer.responseId === null && next.responseId !== null) this.#cancel(next.responseId);
  }

  #send(lane) {
    const request = { type: "response.create", ...lane.request, stream_id: lane.key };
    lane.sent = this.#connection.send(request);
  }

  #resume(lane) {
    const answer = this.#book.read(lane);
    lane.resuming = this.#connection.send({
      type: "response.resume",
      response_id: answer.responseId,
      starting_after: answer.sequence,
      stream_id: lane.key,
    });
  }

  #lost(lane, answer) {
    lane.resuming = false;
    if (answer.responseId === null) this.#end(lane, failAnswer(answer, UNSENT, "unsent"));
    else if (answer.timed) this.#book.write(lane, breakTiming(answer));
  }

  #onError(lane, event) {
    const problem = problemOf(event);
    if (lane === undefined) {
      // An error without a lane after a resume: the server does not know the event, or not the answer.
      const resuming = [...this.#lanes.values()].filter((other) => other.resuming);
      if (resuming.length === 0 && this.#cancels.size === 0) this.#book.notice(problem);
      this.#cancels.clear(); // a stop that came after the end is no news to anybody
      for (const other of resuming) void this.#fetch(other);
      return;
    }
    const answer = this.#book.read(lane);
    if (answer === null) this.#lanes.delete(lane.key);
    else if (lane.resuming) void this.#fetch(lane);
    else this.#end(lane, failAnswer(answer, problem));
  }

  /** The stored response in place of its events, asked for until it has ended. */
  async #fetch(lane) {
    lane.resuming = false;
    if (lane.fetching) return;
    lane.fetching = true;
    try {
      for (;;) {
        const answer = this.#book.read(lane);
        if (answer === null || !isRunning(answer) || this.#connection.status !== "open") return;
        const response = await this.#api.fetchResponse(answer.responseId);
        const now = this.#book.read(lane);
        if (now === null || !isRunning(now)) return;
        if (!["queued", "in_progress"].includes(response.status)) {
          this.#end(lane, applyResponse(now, response));
          return;
        }
        await new Promise((done) => setTimeout(done, FETCH_PAUSE_MS));
      }
    } catch (problem) {
      // Without a reply the server is away: the socket's next "open" resumes. A reply is an answer.
      const answer = this.#book.read(lane);
      if (problem.status !== 0 && answer !== null) this.#end(lane, failAnswer(answer, problem));
    } finally {
      lane.fetching = false;
    }
  }

  #cancel(responseId) {
    this.#cancels.add(responseId);
    if (this.#connection.send({ type: "response.cancel", response_id: responseId })) return;
    this.#api.cancelResponse(responseId).catch((problem) => this.#book.notice(problem));
  }

  #end(lane, answer) {
    this.#lanes.delete(lane.key);
    if (answer.status === "cancelled") this.#cancels.delete(answer.responseId);
    this.#book.write(lane, answer);
  }
}
