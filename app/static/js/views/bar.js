/** The bar above a chat: who answers, and whether the line is up. */

import { assistantOf, baseModelOf, shownOf } from "../assistants.js";
import { html } from "../html.js";
import { Icon } from "./icons.js";

const LINKS = { connecting: "Connecting…", waiting: "Reconnecting…" };

export function Bar({ model, link, onMenu, onNew }) {
  return html`<header class="bar">
    <button type="button" class="ghost only-narrow" aria-label="Show the list of chats" onClick=${onMenu}>
      <${Icon} name="menu" size=${20} />
    </button>
    <div class="bar-who">
      ${model !== null && html`<h1 class="bar-name">${shownOf(model).name}</h1><p class="bar-model">${baseModelOf(model)}</p>`}
    </div>
    <p class="link" role="status">${LINKS[link] && html`<span class="link-word">${LINKS[link]}</span>`}</p>
    <button type="button" class="ghost only-narrow" aria-label="New chat" onClick=${onNew}><${Icon} name="plus" size=${20} /></button>
  </header>`;
}

/** The assistant's sign, a round one beside its answers. */
export function Badge({ model, size = 18 }) {
  const assistant = model === null ? null : assistantOf(model);
  return html`<span class="badge" aria-hidden="true"><${Icon} name=${assistant ?? "model"} size=${size} /></span>`;
}
