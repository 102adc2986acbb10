/** Where a person writes. Enter sends, Shift+Enter breaks the line, an input method keeps its own Enter. */

import { CompositionGuard } from "../composition.js";
import { html, useLayoutEffect, useRef, useState } from "../html.js";
import { Icon, StopIcon } from "./icons.js";

const canHover = matchMedia("(hover: hover)");

export function Composer({ chatId, model, running, chat }) {
  const [text, setText] = useState("");
  const area = useRef(null);
  const guard = useRef(null);
  guard.current ??= new CompositionGuard();

  // On a phone the keyboard would cover the welcome.
  useLayoutEffect(() => {
    if (canHover.matches) area.current.focus({ preventScroll: true });
  }, [chatId]);

  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight}px`;
  }, [text]);

  const send = () => {
    if (running || !chat.send(area.current.value)) return;
    setText("");
  };
  const onSubmit = (event) => {
    event.preventDefault();
    send();
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.altKey) return;
    if (!guard.current.isOwnEnter(event)) return;
    event.preventDefault();
    send();
  };

  return html`<form class="composer" onSubmit=${onSubmit}>
    <label class="unseen" for="message">Message</label>
    <textarea
      id="message"
      ref=${area}
      rows="1"
      placeholder="Write a message"
      enterkeyhint="send"
      value=${text}
      onInput=${(event) => setText(event.currentTarget.value)}
      onKeyDown=${onKeyDown}
      onCompositionStart=${() => guard.current.onStart()}
      onCompositionEnd=${() => guard.current.onEnd()}
    ></textarea>
    ${running
      ? html`<button key="stop" type="button" class="round stop" aria-label="Stop" title="Stop (Escape)" disabled=${running.answer.stopping} onClick=${() => chat.stop(running)}>
          <${StopIcon} />
        </button>`
      : html`<button key="send" type="submit" class="round" aria-label="Send" title="Send (Enter)" disabled=${!text.trim() || model === null}>
          <${Icon} name="send" size=${20} />
        </button>`}
  </form>`;
}
