/** The chats kept in this browser. A drawer on a narrow screen. */

import { html, useEffect, useRef, useState } from "../html.js";
import { currentTheme, onSystemTheme, toggleTheme } from "../theme.js";
import { shownOf } from "../assistants.js";
import { Icon, Mark } from "./icons.js";

export function Sidebar({ open, recents, currentId, storage, onNew, onOpen, onRemove, onClose }) {
  const close = useRef(null);
  useEffect(() => {
    if (open) close.current.focus();
  }, [open]);
  return html`
    <div class=${open ? "scrim shown" : "scrim"} onClick=${onClose}></div>
    <aside class=${open ? "side shown" : "side"} aria-label="Chats">
      <div class="side-head">
        <span class="brand"><${Mark} /><span>trunkline</span></span>
        <button type="button" class="ghost only-narrow" aria-label="Close the list of chats" ref=${close} onClick=${onClose}>
          <${Icon} name="close" />
        </button>
      </div>
      <button type="button" class="new-chat" onClick=${onNew}><${Icon} name="plus" />New chat</button>
      <nav class="recents" aria-label="Recent chats">
        ${recents.length > 0 && html`<h2 class="side-title">Recent</h2>`}
        <ul>
          ${recents.map(
            (chat) => html`<li key=${chat.id} class=${chat.id === currentId ? "recent current" : "recent"}>
              <button
                type="button"
                class="recent-open"
                aria-current=${chat.id === currentId ? "page" : null}
                onClick=${() => onOpen(chat.id)}
              >
                <span class="recent-title">${chat.title || "New chat"}</span>
                <span class="recent-model">${shownOf(chat.model).name}</span>
              </button>
              <button
                type="button"
                class="ghost recent-remove"
                aria-label=${`Delete the chat ${chat.title}`}
                onClick=${() => onRemove(chat.id)}
              >
                <${Icon} name="bin" size=${16} />
              </button>
            </li>`,
          )}
        </ul>
      </nav>
      <div class="side-foot"><${ThemeToggle} storage=${storage} /></div>
    </aside>
  `;
}

function ThemeToggle({ storage }) {
  const [theme, setTheme] = useState(currentTheme);
  useEffect(() => onSystemTheme(() => setTheme(currentTheme())), []);
  const other = theme === "dark" ? "light" : "dark";
  const toggle = () => {
    toggleTheme(storage);
    setTheme(currentTheme());
  };
  return html`<button type="button" class="quiet theme-toggle" aria-label=${`Use the ${other} theme`} onClick=${toggle}>
    <${Icon} name=${theme === "dark" ? "sun" : "moon"} />${theme === "dark" ? "Light" : "Dark"} theme
  </button>`;
}
