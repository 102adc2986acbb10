/** Puts the parts together and draws them. */

import { Api } from "./api.js";
import { Archive, openStorage } from "./archive.js";
import { Chat, INITIAL_STATE } from "./chat.js";
import { Connection, socketUrl } from "./connection.js";
import { html, render } from "./html.js";
import { oncePerFrame, Store } from "./store.js";
import { App } from "./views/app.js";

const LAST_CHAT = "trunkline.last";

/** The tab's conversation: in the address, so that a link or "back" finds it, and in the tab's own storage. */
function tabPlace(session) {
  return {
    get: () => location.hash.slice(1) || session?.getItem(LAST_CHAT) || null,
    set: (id) => {
      if (id === null) session?.removeItem(LAST_CHAT);
      else session?.setItem(LAST_CHAT, id);
      if (id !== (location.hash.slice(1) || null)) history.pushState(null, "", id === null ? location.pathname : `#${id}`);
    },
  };
}

function main() {
  const local = openStorage("localStorage");
  const session = openStorage("sessionStorage");
  const store = new Store(INITIAL_STATE);
  const api = new Api(session);
  const chat = new Chat({ store, archive: new Archive(local), api, place: tabPlace(session) });
  const connection = new Connection({
    url: socketUrl("/v1/responses"),
    protocols: () => api.socketProtocols(),
    onEvent: (event) => chat.onEvent(event),
    onStatus: (status) => chat.onStatus(status),
    onRefused: () => chat.lock(),
  });

  const root = document.getElementById("app");
  const draw = () => render(html`<${App} state=${store.state} chat=${chat} storage=${local} />`, root);
  store.subscribe(oncePerFrame(draw));
  chat.start(connection);
  draw();

  addEventListener("storage", (event) => chat.onStorage(event.key));
  addEventListener("popstate", () => chat.open(location.hash.slice(1) || null));
  addEventListener("pagehide", () => chat.flush());
  document.addEventListener("visibilitychange", () => document.visibilityState === "hidden" && chat.flush());
}

main();
