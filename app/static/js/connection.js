/**
 * The socket to /v1/responses: opens, reopens with a growing pause, reads and writes JSON events.
 * It knows nothing of answers: who needs to go on after a break asks for it when told "open".
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
  status = "closed"; // connecting, open, waiting (for the next try), closed (before the first)

  /** `onEvent(event)` for each event; `onStatus("connecting" | "open" | "waiting")` at each change. */
  constructor({ url, onEvent, onStatus }) {
    this.#url = url;
    this.#onEvent = onEvent;
    this.#onStatus = onStatus;
    addEventListener("online", () => this.#hurry());
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.#hurry());
  }

  open() {
    if (this.#socket !== null) return;
    clearTimeout(this.#timer);
    this.#set("connecting");
    const socket = new WebSocket(this.#url);
    this.#socket = socket;
    socket.addEventListener("open", () => {
      this.#pauseMs = FIRST_PAUSE_MS;
      this.#set("open");
    });
    socket.addEventListener("message", (message) => this.#read(message.data));
    socket.addEventListener("close", () => this.#retry());
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
    this.#onEvent(event);
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
