/** A new chat: whom to talk to, and what one might say. */

import { assistantOf, shownOf } from "../assistants.js";
import { html } from "../html.js";
import { describe } from "../problems.js";
import { Badge } from "./bar.js";
import { Icon, Mark } from "./icons.js";

export function Welcome({ state, chat }) {
  return html`<div class="scroll">
    <div class="welcome">
      <${Mark} size=${44} />
      <h2>Who should answer?</h2>
      <p class="welcome-line">Everyone who picks the same assistant shares its prompt: it is computed once, for all.</p>
      ${state.modelsProblem && html`<${Unreachable} problem=${state.modelsProblem} onRetry=${() => chat.loadModels()} />`}
      ${state.models === null && !state.modelsProblem && html`<p class="muted" role="status">Asking the server…</p>`}
      ${state.models && html`<${Cards} models=${state.models} chosen=${state.model} onChoose=${(id) => chat.chooseModel(id)} />`}
      ${state.model && html`<${Examples} model=${state.model} onPick=${(text) => chat.send(text)} />`}
    </div>
  </div>`;
}

function Unreachable({ problem, onRetry }) {
  return html`<div class="notice" role="alert">
    <p>${describe(problem).sentence}</p>
    <button type="button" class="quiet" onClick=${onRetry}><${Icon} name="again" size=${16} />Try again</button>
  </div>`;
}

function Cards({ models, chosen, onChoose }) {
  // Assistants first; a model alone comes last.
  const ordered = [...models].sort((a, b) => (assistantOf(a.id) === null) - (assistantOf(b.id) === null));
  return html`<fieldset class="cards">
    <legend class="unseen">Assistant</legend>
    ${ordered.map(({ id, description }) => {
      const { name, line } = shownOf(id, description);
      return html`<label key=${id} class="card">
        <input type="radio" name="assistant" value=${id} checked=${id === chosen} onChange=${() => onChoose(id)} />
        <${Badge} model=${id} size=${20} />
        <span class="card-name">${name}</span>
        <span class="card-line">${line}</span>
      </label>`;
    })}
  </fieldset>`;
}

function Examples({ model, onPick }) {
  const { examples } = shownOf(model);
  return html`<div class="examples">
    ${examples.map((text) => html`<button key=${text} type="button" class="example" onClick=${() => onPick(text)}>${text}</button>`)}
  </div>`;
}
