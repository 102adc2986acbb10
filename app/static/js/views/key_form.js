/** Where a person says who they are, on a server that asks for a key. */

import { html, useState } from "../html.js";
import { Mark } from "./icons.js";

export function KeyForm({ problem, onKey }) {
  const [key, setKey] = useState("");
  const onSubmit = (event) => {
    event.preventDefault();
    onKey(key.trim());
  };
  return html`<div class="scroll">
    <form class="welcome key-form" onSubmit=${onSubmit}>
      <${Mark} size=${44} />
      <h2>This server asks for a key</h2>
      <p class="welcome-line">It is kept for this tab only, and forgotten when you close it.</p>
      ${problem.message && html`<p class="notice" role="alert">${problem.message}</p>`}
      <label class="unseen" for="key">API key</label>
      <input
        id="key"
        type="password"
        autocomplete="off"
        spellcheck=${false}
        placeholder="API key"
        value=${key}
        onInput=${(event) => setKey(event.currentTarget.value)}
      />
      <button type="submit" class="new-chat" disabled=${!key.trim()}>Go on</button>
    </form>
  </div>`;
}
