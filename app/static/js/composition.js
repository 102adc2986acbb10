/**
 * Tells the Enter that sends from the Enter that accepts a candidate of an input method.
 *
 * While composing, an Enter belongs to the input method (isComposing, or key code 229). Some engines end the composition
 * first and deliver that Enter just after it, in the same tick and looking like any other; so when a composition ended
 * without having shown its Enter, the next one of the same tick is taken for it.
 */

const PROCESSED_BY_INPUT_METHOD = 229;

export class CompositionGuard {
  #composing = false;
  #sawEnter = false;
  #owedEnter = false;

  onStart() {
    this.#composing = true;
    this.#sawEnter = false;
    this.#owedEnter = false;
  }

  onEnd() {
    this.#composing = false;
    if (this.#sawEnter) return;
    this.#owedEnter = true;
    setTimeout(() => (this.#owedEnter = false), 0);
  }

  /** Whether this keydown of Enter is the person's own. To be asked once for each Enter. */
  isOwnEnter(event) {
    if (this.#composing || event.isComposing || event.keyCode === PROCESSED_BY_INPUT_METHOD) {
      this.#sawEnter = true;
      return false;
    }
    if (!this.#owedEnter) return true;
    this.#owedEnter = false;
    return false;
  }
}
