/** The page's state: one object that is replaced, never changed, and who wants to know. */

export class Store {
  #listeners = new Set();

  constructor(state) {
    this.state = state;
  }

  set(patch) {
    this.state = { ...this.state, ...patch };
    for (const listener of this.#listeners) listener();
  }

  subscribe(listener) {
    this.#listeners.add(listener);
  }
}

/** Calls `draw` at most once per frame, however often the returned function is called. A hidden tab draws when shown. */
export function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}
