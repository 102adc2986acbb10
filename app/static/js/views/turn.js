/** One question and its answer. Drawn again only when the turn itself has changed. */

import { isRunning } from "../answer.js";
import { shownOf } from "../assistants.js";
import { copyText } from "../clipboard.js";
import { Component, html, useEffect, useState } from "../html.js";
import { describe } from "../problems.js";
import { AnswerBody } from "./answer_body.js";
import { Badge } from "./bar.js";
import { Icon } from "./icons.js";
import { Measures } from "./measures.js";

export class Turn extends Component {
  shouldComponentUpdate(next) {
    return ["turn", "position", "count"].some((name) => next[name] !== this.props[name]);
  }

  render({ turn, model, position, count, chat }) {
    return html`<section class="turn">
      <article class="question" aria-label="You">${turn.prompt}</article>
      <article class="answer" aria-label=${shownOf(model).name}>
        <${Badge} model=${model} />
        <div class="answer-main">
          <${AnswerBody} text=${turn.answer.text} running=${isRunning(turn.answer)} />
          <${State} turn=${turn} chat=${chat} />
          ${!isRunning(turn.answer) && html`<${Actions} turn=${turn} position=${position} count=${count} chat=${chat} />`}
        </div>
      </article>
    </section>`;
  }
}

/** What the answer is doing, or why it is not whole. Nothing where the text says it all. */
function State({ turn, chat }) {
  const { answer } = turn;
  if (answer.status === "failed" || answer.status === "unsent") {
    const { sentence, detail } = describe(answer.problem);
    return html`<div class="problem" role="alert">
      <p>${sentence}${detail && html`<small>${detail}</small>`}</p>
      <button type="button" class="quiet" onClick=${() => chat.retry(turn)}><${Icon} name="again" size=${16} />Try again</button>
    </div>`;
  }
  if (answer.status === "cancelled") return html`<p class="remark">Stopped</p>`;
  if (answer.status === "incomplete") {
    const cut = answer.reason === "max_output_tokens" ? "Cut off: the limit of the length was reached" : "Cut off";
    return html`<p class="remark">${cut}</p>`;
  }
  if (!isRunning(answer)) return null;
  if (answer.stopping) return html`<p class="remark" role="status">Stopping…</p>`;
  if (answer.text) return null;
  const doing = answer.status === "sending" ? "Sending" : "Reading the prompt";
  return html`<p class="thinking" role="status"><span class="unseen">${doing}</span><i></i><i></i><i></i></p>`;
}

function Actions({ turn, position, count, chat }) {
  const isWhole = !["failed", "unsent"].includes(turn.answer.status); // otherwise "Try again" stands above
  return html`<div class="under">
    <${Measures} answer=${turn.answer} />
    <div class="actions">
      ${count > 1 && html`<${Variants} turn=${turn} position=${position} count=${count} chat=${chat} />`}
      ${turn.answer.text && html`<${CopyAnswer} text=${turn.answer.text} />`}
      ${isWhole &&
      html`<button type="button" class="ghost" aria-label="Regenerate" title="Regenerate" onClick=${() => chat.regenerate(turn)}>
        <${Icon} name="again" size=${16} />
      </button>`}
    </div>
  </div>`;
}

function Variants({ turn, position, count, chat }) {
  return html`<div class="variants" role="group" aria-label="Answers to this question">
    <button type="button" class="ghost" aria-label="Previous answer" disabled=${position === 0} onClick=${() => chat.step(turn, -1)}>
      <${Icon} name="left" size=${16} />
    </button>
    <span>${position + 1}/${count}</span>
    <button type="button" class="ghost" aria-label="Next answer" disabled=${position === count - 1} onClick=${() => chat.step(turn, 1)}>
      <${Icon} name="right" size=${16} />
    </button>
  </div>`;
}

function CopyAnswer({ text }) {
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    if (!copied) return undefined;
    const timer = setTimeout(() => setCopied(false), 1500);
    return () => clearTimeout(timer);
  }, [copied]);
  const copy = async () => setCopied(await copyText(text));
  return html`<button type="button" class="ghost" aria-label=${copied ? "Copied" : "Copy answer"} title="Copy" onClick=${copy}>
    <${Icon} name=${copied ? "check" : "copy"} size=${16} />
  </button>`;
}
