/** The whole page: the list of chats beside the one that is shown. */

import { isRunning } from "../answer.js";
import { pathOf } from "../conversation.js";
import { html, useEffect, useState } from "../html.js";
import { Bar } from "./bar.js";
import { Composer } from "./composer.js";
import { KeyForm } from "./key_form.js";
import { Notice } from "./notice.js";
import { Sidebar } from "./sidebar.js";
import { Thread } from "./thread.js";
import { Welcome } from "./welcome.js";

export function App({ state, chat, storage }) {
  const [drawer, setDrawer] = useState(false);
  const conversation = state.conversations[state.currentId] ?? null;
  const path = conversation ? pathOf(conversation) : [];
  const running = path.find((turn) => isRunning(turn.answer)) ?? null;
  const model = conversation?.model ?? state.model;

  useEffect(() => {
    const onKey = (event) => {
      if (event.key !== "Escape" || event.isComposing) return;
      if (drawer) setDrawer(false);
      else if (running) chat.stop(running);
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [drawer, running, chat]);

  useEffect(() => {
    document.title = conversation?.title ? `${conversation.title} · trunkline` : "trunkline";
  }, [conversation?.title]);

  const away = (act) => () => {
    setDrawer(false);
    act();
  };

  return html`
    <div class="app">
      <${Sidebar}
        open=${drawer}
        recents=${state.recents}
        currentId=${state.currentId}
        storage=${storage}
        onNew=${away(() => chat.newChat())}
        onOpen=${(id) => away(() => chat.open(id))()}
        onRemove=${(id) => chat.remove(id)}
        onClose=${() => setDrawer(false)}
      />
      <main class="main">
        <${Bar} model=${model} link=${state.link} onMenu=${() => setDrawer(true)} onNew=${away(() => chat.newChat())} />
        ${state.locked
          ? html`<${KeyForm} problem=${state.locked} onKey=${(key) => chat.unlock(key)} />`
          : html`<${Conversation} state=${state} conversation=${conversation} path=${path} model=${model} running=${running} chat=${chat} />`}
      </main>
    </div>
  `;
}

function Conversation({ state, conversation, path, model, running, chat }) {
  return html`
    ${conversation
      ? html`<${Thread} key=${conversation.id} conversation=${conversation} path=${path} chat=${chat} />`
      : html`<${Welcome} state=${state} chat=${chat} />`}
    <div class="foot">
      ${state.notice && html`<${Notice} problem=${state.notice} onDismiss=${() => chat.dismissNotice()} />`}
      <${Composer} chatId=${state.currentId} model=${model} running=${running} chat=${chat} />
    </div>
  `;
}
