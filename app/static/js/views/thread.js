/** The turns of a chat in a view that follows the newest words until the person scrolls up. */

import { isRunning } from "../answer.js";
import { siblingsOf } from "../conversation.js";
import { Follow } from "../follow.js";
import { html, useLayoutEffect, useRef, useState } from "../html.js";
import { Icon } from "./icons.js";
import { Turn } from "./turn.js";

export function Thread({ conversation, path, chat }) {
  const [following, setFollowing] = useState(true);
  const scroll = useRef(null);
  const column = useRef(null);
  const follow = useRef(null);
  follow.current ??= new Follow(setFollowing);

  useLayoutEffect(() => {
    follow.current.attach(scroll.current, column.current);
    return () => follow.current.detach();
  }, []);

  // A new question, or another variant, is what the person wants to see.
  const last = path.at(-1);
  useLayoutEffect(() => follow.current.toEnd(), [last?.id, last?.answer.key]);

  const running = path.some((turn) => isRunning(turn.answer));
  return html`
    <div class="scroll" ref=${scroll}>
      <div class="column" ref=${column} role="log" aria-live="polite" aria-busy=${running ? "true" : "false"} aria-label="Chat">
        ${path.map((turn) => {
          const siblings = siblingsOf(conversation, turn);
          return html`<${Turn}
            key=${turn.id}
            turn=${turn}
            model=${conversation.model}
            position=${siblings.indexOf(turn)}
            count=${siblings.length}
            chat=${chat}
          />`;
        })}
      </div>
    </div>
    <div class="to-latest-place">
      ${!following &&
      html`<button type="button" class="to-latest" onClick=${() => follow.current.toEnd()}>
        <${Icon} name="down" size=${16} />Jump to latest
      </button>`}
    </div>
  `;
}
