/** Conversations kept in this browser: at most MAX_CHATS, the least recently used go first. */

const PREFIX = "trunkline.chat.";
export const MAX_CHATS = 40;

export class Archive {
  #storage;
  #entries = new Map(); // id -> { id, title, model, updatedAt }
  #list = null; // #entries, newest first; the same array until something changes

  /** `storage` is localStorage, or null where the browser blocks it: then nothing outlives the page. */
  constructor(storage) {
    this.#storage = storage;
    const ids = Array.from({ length: storage?.length ?? 0 }, (_, i) => chatOfKey(storage.key(i)));
    for (const id of ids) if (id !== null) this.refresh(id);
  }

  /** { id, title, model, updatedAt } of every kept conversation, newest first. */
  list() {
    this.#list ??= [...this.#entries.values()].sort((a, b) => b.updatedAt - a.updatedAt);
    return this.#list;
  }

  /** Reads again what another tab may have written; null stands for all. */
  refresh(id) {
    for (const each of id === null ? [...this.#entries.keys()] : [id]) this.#note(each, this.load(each));
  }

  /** The conversation, or null when it is gone or not readable. */
  load(id) {
    const text = this.#storage?.getItem(PREFIX + id);
    if (!text) return null;
    try {
      const chat = JSON.parse(text);
      return chat.id === id && chat.turns && chat.chosen ? chat : null;
    } catch {
      return null;
    }
  }

  /** Whether it was kept. Drops the oldest conversations when there are too many or the storage is full. */
  save(conversation) {
    if (this.#storage === null) return false;
    const text = JSON.stringify(conversation);
    const others = this.list().filter((chat) => chat.id !== conversation.id);
    while (others.length >= MAX_CHATS) this.remove(others.pop().id);
    for (;;) {
      try {
        this.#storage.setItem(PREFIX + conversation.id, text);
        this.#note(conversation.id, conversation);
        return true;
      } catch {
        if (others.length === 0) return false;
        this.remove(others.pop().id);
      }
    }
  }

  remove(id) {
    this.#storage?.removeItem(PREFIX + id);
    this.#note(id, null);
  }

  #note(id, chat) {
    const before = this.#entries.get(id);
    if (chat === null) {
      if (this.#entries.delete(id)) this.#list = null;
    } else if (before?.updatedAt !== chat.updatedAt) {
      const { title, model, updatedAt } = chat;
      this.#entries.set(id, { id, title, model, updatedAt });
      this.#list = null;
    }
  }
}

/** `name` is localStorage or sessionStorage. A browser that blocks storage throws at the first touch: then null. */
export function openStorage(name) {
  try {
    const storage = window[name];
    storage.getItem("trunkline");
    return storage;
  } catch {
    return null;
  }
}

/** The id of the conversation in a storage event's key, or null. */
export const chatOfKey = (key) => (key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null);
