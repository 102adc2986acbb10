/**
 * The socket to /v1/responses: opens, reopens with a growing pause, reads and writes JSON events.
 * It knows nothing of answers: who needs to go on after a break asks for it when told "open". Where the server asks for
 * a new socket, because it ends or this one is old, that is a break too, of the length that the server names.
 */

const FIRST_PAUSE_MS = 400;
const LONGEST_PAUSE_MS = 10_000;
/** The server takes 256 KiB a message; the rest of the frame needs room too. */
export const MAX_MESSAGE_BYTES = 250 * 1024;

export class Connection {
  #url;
  #socket = null;
  #timer = null;
  #pauseMs = FIRST_PAUSE_MS;
  #onEvent;
  #onStatus;
  #onRefused;
  #protocols;
  #attempt = 0; // counts tries: one that was given up must not go on
  status = "closed"; // connecting, open, waiting (for the next try), closed (before the first, and after `close`)

  /**
   * `protocols()` promises the subprotocols to open a socket with, anew for each. `onEvent(event)` for each event;
   * `onStatus` at each change of `status`; `onRefused(problem)` when there are no protocols as the caller is unknown:
   * then no further try is made.
   */
  constructor({ url, protocols, onEvent, onStatus, onRefused }) {
    this.#url = url;
    this.#protocols = protocols;
    this.#onRefused = onRefused;
    this.#onEvent = onEvent;
    this.#onStatus = onStatus;
    addEventListener("online", () => this.#hurry());
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.#hurry());
  }

  open() {
    if (this.status === "connecting" || this.status === "open") return;
    clearTimeout(this.#timer);
    this.#set("connecting");
    void this.#connect(++this.#attempt);
  }

  /** Ends the socket, or the tries for one, until `open`. */
  close() {
    this.#attempt++;
    clearTimeout(this.#timer);
    this.#socket?.close();
    this.#socket = null;
    this.#set("closed");
  }

  async #connect(attempt) {
    let protocols;
    try {
      protocols = await this.#protocols();
    } catch (problem) {
      if (attempt !== this.#attempt) return;
      if (problem.status === 401) this.#onRefused(problem);
      else this.#retry();
      return;
    }
    if (attempt !== this.#attempt) return;
    const socket = new WebSocket(this.#url, protocols);
    this.#socket = socket;
    const on = (name, act) => socket.addEventListener(name, (event) => attempt === this.#attempt && act(event));
    on("open", () => {
      this.#pauseMs = FIRST_PAUSE_MS;
      this.#set("open");
    });
    on("message", (message) => this.#read(message.data));
    on("close", () => this.#retry());
  }

  /** Whether the event was handed to an open socket. */
  send(event) {
    if (this.status !== "open") return false;
    this.#socket.send(JSON.stringify(event));
    return true;
  }

  #read(data) {
    let event;
    try {
      event = JSON.parse(data);
    } catch {
      event = { type: "error", error: { code: "unreadable", message: "The server sent something that this page cannot read." } };
    }
    if (event.type === "reconnect") this.#renew(event.after_ms);
    else this.#onEvent(event);
  }

  /** This socket takes nothing new any more. */
  #renew(afterMs) {
    this.#attempt++;
    this.#socket.close();
    this.#socket = null;
    this.#timer = setTimeout(() => this.open(), afterMs);
    this.#set("waiting");
  }

  #retry() {
    this.#socket = null;
    // Many pages lose the same server at once: half of the pause is random.
    const pause = this.#pauseMs * (0.5 + Math.random() / 2);
    this.#pauseMs = Math.min(this.#pauseMs * 2, LONGEST_PAUSE_MS);
    this.#timer = setTimeout(() => this.open(), pause);
    this.#set("waiting");
  }

  /** The network or the tab is back: try at once. */
  #hurry() {
    if (this.status !== "waiting") return;
    this.#pauseMs = FIRST_PAUSE_MS;
    this.open();
  }

  #set(status) {
    this.status = status;
    this.#onStatus(status);
  }
}

/** ws: or wss: of the page's own origin. */
export function socketUrl(path) {
  const url = new URL(path, location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url.href;
}
