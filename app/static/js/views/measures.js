/** Under an answer: how soon it began, how fast it came, how much of its prompt was shared. */

import { measuresOf } from "../answer.js";
import { html } from "../html.js";

export function Measures({ answer }) {
  const { ttftMs, tokensPerSecond, sharedTokens, inputTokens } = measuresOf(answer);
  return html`<dl class="measures">
    ${ttftMs !== null && html`<${Measure} name="TTFT" explain="Time to the first token" value=${duration(ttftMs)} />`}
    ${tokensPerSecond !== null &&
    html`<${Measure} name="Speed" explain="Tokens a second after the first" value=${`${tokensPerSecond.toFixed(1)} tokens/s`} unnamed />`}
    ${inputTokens !== null && html`<${Shared} shared=${sharedTokens} all=${inputTokens} />`}
  </dl>`;
}

function Measure({ name, value, explain, unnamed = false }) {
  return html`<div class="measure" title=${explain}>
    <dt class=${unnamed ? "unseen" : ""}>${name}</dt>
    <dd>${value}</dd>
  </div>`;
}

function Shared({ shared, all }) {
  const percent = all > 0 ? Math.round((100 * shared) / all) : 0;
  return html`<div class="measure shared" title=${`${percent}% of the prompt was already computed`}>
    <dt class="unseen">Shared prefix</dt>
    <dd><span class="gauge" aria-hidden="true"><span style=${{ width: `${percent}%` }}></span></span>${shared} of ${all} prompt tokens shared</dd>
  </div>`;
}

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
