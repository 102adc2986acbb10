/** Something that went wrong and belongs to no answer. */

import { html } from "../html.js";
import { describe } from "../problems.js";
import { Icon } from "./icons.js";

export function Notice({ problem, onDismiss }) {
  const { sentence, detail } = describe(problem);
  return html`<div class="notice" role="alert">
    <p>${sentence}${detail && html`<small>${detail}</small>`}</p>
    <button type="button" class="ghost" aria-label="Dismiss" onClick=${onDismiss}><${Icon} name="close" size=${16} /></button>
  </div>`;
}
