/** The rendered text of an answer, drawn into one element that Preact leaves alone. */

import { copyText } from "../clipboard.js";
import { html, useLayoutEffect, useRef } from "../html.js";
import { renderMarkdown } from "../markdown.js";
import { morphChildren } from "../morph.js";

// While text arrives, drawing may take a quarter of the time at most: a very long answer is drawn less often.
const REST_PER_COST = 3;

export function AnswerBody({ text, running }) {
  const element = useRef(null);
  const pace = useRef({ drawn: "", dueMs: 0 });

  useLayoutEffect(() => {
    const draw = () => {
      const start = performance.now();
      morphChildren(element.current, renderMarkdown(text));
      const end = performance.now();
      pace.current = { drawn: text, dueMs: end + (end - start) * REST_PER_COST };
    };
    if (text === pace.current.drawn) return undefined;
    const wait = running ? pace.current.dueMs - performance.now() : 0;
    if (wait <= 0) {
      draw();
      return undefined;
    }
    const timer = setTimeout(draw, wait);
    return () => clearTimeout(timer);
  }, [text, running]);

  return html`<div class=${running && text ? "prose running" : "prose"} ref=${element} onClick=${copyCode}></div>`;
}

async function copyCode(event) {
  const button = event.target.closest(".copy-code");
  if (button === null) return;
  const code = button.closest(".code-box").querySelector("pre").textContent;
  button.textContent = (await copyText(code)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
