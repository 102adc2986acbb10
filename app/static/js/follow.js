/**
 * Keeps the end of a growing text in view until the person scrolls up; then leaves the view alone until they are back
 * at the end, or ask for it.
 */

const NEAR_PX = 32;

export class Follow {
  #element = null;
  #observer = null;
  #lastTop = 0;
  #onChange;
  following = true;

  /** `onChange(following)` when following starts or stops. */
  constructor(onChange) {
    this.#onChange = onChange;
  }

  /** Watches the scrolling `element` and its `content`. */
  attach(element, content) {
    this.#element = element;
    element.addEventListener("scroll", this.#onScroll, { passive: true });
    element.addEventListener("wheel", this.#onWheel, { passive: true });
    // Runs after layout and before paint, so that a new line and the scroll to it are one picture.
    this.#observer = new ResizeObserver(() => this.#keepEnd());
    this.#observer.observe(element);
    this.#observer.observe(content);
    this.#keepEnd();
  }

  detach() {
    this.#observer.disconnect();
    this.#element.removeEventListener("scroll", this.#onScroll);
    this.#element.removeEventListener("wheel", this.#onWheel);
    this.#element = null;
  }

  toEnd() {
    this.#set(true);
    this.#keepEnd();
  }

  #keepEnd() {
    if (!this.following || this.#element === null) return;
    this.#element.scrollTop = this.#element.scrollHeight;
    this.#lastTop = this.#element.scrollTop;
  }

  get #distance() {
    const { scrollHeight, scrollTop, clientHeight } = this.#element;
    return scrollHeight - scrollTop - clientHeight;
  }

  #onScroll = () => {
    const top = this.#element.scrollTop;
    const moved = top - this.#lastTop; // 0 for the event that our own scrolling causes
    this.#lastTop = top;
    // A text that became shorter moves the view up too, but leaves it at the end.
    if (moved < -0.5 && this.#distance > 1) this.#set(false);
    else if (moved > 0.5 && this.#distance <= NEAR_PX) this.#set(true);
  };

  #onWheel = (event) => {
    // Before the first pixel has moved: the next token must not take it back.
    if (event.deltaY < 0 && this.#element.scrollTop > 0) this.#set(false);
  };

  #set(following) {
    if (this.following === following) return;
    this.following = following;
    this.#onChange(following);
  }
}
