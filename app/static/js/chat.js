/** What a person does at the page: choose, send, stop, regenerate, go back. Holds the state; the views show it. */

import { isRunning, newAnswer } from "./answer.js";
import { chatOfKey } from "./archive.js";
import { assistantOf, baseModelOf } from "./assistants.js";
import { MAX_MESSAGE_BYTES } from "./connection.js";
import * as talk from "./conversation.js";
import { newId } from "./ids.js";
import { Lanes } from "./lanes.js";
import { TOO_LONG } from "./problems.js";

const SAVE_PAUSE_MS = 500;

// A small model rambles at the API's default temperature of 1, and may repeat itself without end at a low one.
const SAMPLING = { temperature: 0.3, top_p: 0.9, repetition_penalty: 1.1, max_output_tokens: 1024 };

export const INITIAL_STATE = {
  models: null, // [{ id, description }] once the server has told
  modelsProblem: null,
  model: null, // id chosen for the next new chat
  conversations: {}, // those in memory: the one shown and those with an answer under way
  currentId: null, // null: a new chat that nobody has written in
  recents: [],
  link: "connecting",
  notice: null,
  locked: null, // { message } while the server asks for a key and the page has none that it takes
};

export class Chat {
  #store;
  #archive;
  #api;
  #place;
  #connection = null;
  #lanes = null;
  #loading = false;
  #saving = new Map(); // conversation id -> timer

  /** `place.get()` and `place.set(id | null)`: the conversation that this tab shows, kept over a reload. */
  constructor({ store, archive, api, place }) {
    this.#store = store;
    this.#archive = archive;
    this.#api = api;
    this.#place = place;
  }

  /** Connects the socket's two callbacks, then shows what this tab showed last. */
  start(connection) {
    this.#connection = connection;
    this.#lanes = new Lanes({
      connection,
      api: this.#api,
      book: {
        read: (lane) => this.#state.conversations[lane.conversationId]?.turns[lane.turnId]?.answer ?? null,
        write: (lane, answer) => this.#write(lane, answer),
        notice: (notice) => this.#store.set({ notice }),
      },
    });
    this.#store.set({ recents: this.#archive.list() });
    this.open(this.#place.get());
    connection.open();
    void this.loadModels();
  }

  onStatus(link) {
    this.#store.set({ link });
    this.#lanes.onStatus(link);
    if (link === "open" && this.#state.models === null) void this.loadModels();
  }

  onEvent(event) {
    this.#lanes.onEvent(event);
  }

  async loadModels() {
    if (this.#loading) return;
    this.#loading = true;
    try {
      const models = await this.#api.fetchModels();
      const first = models.find((model) => assistantOf(model.id) !== null) ?? models[0];
      const model = models.some(({ id }) => id === this.#state.model) ? this.#state.model : (first?.id ?? null);
      this.#store.set({ models, model, locked: null, modelsProblem: models.length ? null : { message: "The server serves no model." } });
    } catch (problem) {
      if (problem.status === 401) this.lock();
      else this.#store.set({ modelsProblem: problem });
    } finally {
      this.#loading = false;
    }
  }

  /** The server does not know who this is: nothing is tried until `unlock`. */
  lock() {
    const message = this.#api.hasKey ? "The server does not take this key." : null;
    this.#store.set({ locked: { message }, modelsProblem: null });
    this.#api.useKey(null);
    this.#connection.close();
  }

  /** Goes on with the key that a person typed. */
  async unlock(key) {
    this.#api.useKey(key);
    await this.loadModels();
    if (this.#state.locked === null) this.#connection.open();
    else if (this.#state.modelsProblem) this.#store.set({ locked: this.#state.modelsProblem });
  }

  chooseModel(model) {
    this.#store.set({ model });
  }

  /** Shows the conversation; an unknown id, or null, shows a new chat. */
  open(id) {
    const conversation = id === null ? null : (this.#state.conversations[id] ?? this.#archive.load(id));
    const conversations = Object.fromEntries(
      Object.entries(this.#state.conversations).filter(([, other]) => talk.runningTurnsOf(other).length > 0),
    );
    if (conversation) conversations[conversation.id] = conversation;
    this.#store.set({ conversations, currentId: conversation?.id ?? null, notice: null });
    this.#place.set(conversation?.id ?? null);
    if (!conversation) return;
    for (const turn of talk.runningTurnsOf(conversation)) this.#lanes.adopt(placeOf(conversation, turn));
  }

  newChat() {
    this.open(null);
  }

  remove(id) {
    const conversation = this.#state.conversations[id];
    if (conversation) for (const turn of talk.runningTurnsOf(conversation)) this.#lanes.stop(turn.answer.key);
    clearTimeout(this.#saving.get(id));
    this.#saving.delete(id);
    this.#archive.remove(id);
    const { [id]: _, ...conversations } = this.#state.conversations;
    this.#store.set({ conversations, recents: this.#archive.list() });
    if (this.#state.currentId === id) this.newChat();
  }

  /** Whether the message was taken. */
  send(text) {
    const current = this.#current;
    if (!text.trim() || (current === null && this.#state.model === null)) return false;
    if (new TextEncoder().encode(JSON.stringify(text)).length > MAX_MESSAGE_BYTES) {
      this.#store.set({ notice: TOO_LONG });
      return false;
    }
    const conversation = current ?? talk.newConversation(this.#state.model, Date.now());
    return this.#add(conversation, talk.pathOf(conversation).at(-1)?.id ?? talk.ROOT, text);
  }

  /** A second child of the same parent, with the same question. */
  regenerate(turn) {
    this.#add(this.#current, turn.parent, turn.prompt);
  }

  /** The same turn again, after its answer failed or the server never confirmed it. */
  retry(turn) {
    // The key is the message's own id, sent as client_message_id: an unconfirmed message keeps it, so that one that did
    // arrive is not answered twice.
    const key = turn.answer.status === "unsent" && turn.answer.responseId === null ? turn.answer.key : newId("a");
    const conversation = talk.withAnswer(this.#current, turn.id, newAnswer(key, Date.now()));
    this.#keep(conversation);
    this.#begin(conversation, conversation.turns[turn.id]);
  }

  /** Shows the answer beside this one: the one made `by` (-1, +1) before or after it, if there is one. */
  step(turn, by) {
    const siblings = talk.siblingsOf(this.#current, turn);
    const other = siblings[siblings.indexOf(turn) + by];
    if (other) this.#keep(talk.chooseTurn(this.#current, other));
  }

  stop(turn) {
    this.#lanes.stop(turn.answer.key);
  }

  dismissNotice() {
    this.#store.set({ notice: null });
  }

  /** Another tab changed the kept conversations. */
  onStorage(key) {
    const id = key === null ? null : chatOfKey(key);
    if (key !== null && id === null) return;
    this.#archive.refresh(id);
    this.#store.set({ recents: this.#archive.list() });
    const mine = this.#state.conversations[id];
    const stored = mine ? this.#archive.load(id) : null;
    if (!stored) return;
    const next = talk.takeOver(mine, stored, (turn) => this.#lanes.has(turn.answer.key));
    this.#store.set({ conversations: { ...this.#state.conversations, [id]: next } });
    const confirmed = talk.runningTurnsOf(next).filter((turn) => turn.answer.responseId !== null);
    for (const turn of confirmed) this.#lanes.adopt(placeOf(next, turn));
  }

  /** Writes what is still unsaved: the page may go. */
  flush() {
    for (const id of [...this.#saving.keys()]) this.#save(id);
  }

  get #state() {
    return this.#store.state;
  }

  get #current() {
    return this.#state.conversations[this.#state.currentId] ?? null;
  }

  #add(conversation, parent, prompt) {
    try {
      const [next, turn] = talk.addTurn(conversation, parent, prompt, Date.now());
      this.#keep(next);
      this.#store.set({ currentId: next.id, notice: null });
      this.#place.set(next.id);
      this.#begin(next, turn);
      return true;
    } catch (problem) {
      if (!(problem instanceof RangeError)) throw problem;
      this.#store.set({ notice: { message: problem.message } });
      return false;
    }
  }

  #begin(conversation, turn) {
    const parent = talk.parentResponseOf(conversation, turn);
    const model = baseModelOf(conversation.model);
    const request = { ...SAMPLING, model, input: turn.prompt, client_message_id: turn.answer.key };
    const assistant = assistantOf(conversation.model);
    if (parent !== null) request.previous_response_id = parent; // which brings the assistant's prompt along
    else if (assistant !== null) request.prompt = { id: assistant };
    this.#lanes.begin(placeOf(conversation, turn), request);
  }

  #write(lane, answer) {
    const conversation = this.#state.conversations[lane.conversationId];
    const before = conversation.turns[lane.turnId].answer;
    const next = talk.withAnswer(conversation, lane.turnId, answer);
    this.#store.set({ conversations: { ...this.#state.conversations, [next.id]: next } });
    // What a reload needs is written at once: the id to resume by, and the end.
    if (before.responseId !== answer.responseId || !isRunning(answer)) this.#save(next.id);
    else this.#saveSoon(next.id);
  }

  #keep(conversation) {
    this.#store.set({ conversations: { ...this.#state.conversations, [conversation.id]: conversation } });
    this.#save(conversation.id);
  }

  #saveSoon(id) {
    if (!this.#saving.has(id)) this.#saving.set(id, setTimeout(() => this.#save(id), SAVE_PAUSE_MS));
  }

  #save(id) {
    clearTimeout(this.#saving.get(id));
    this.#saving.delete(id);
    const mine = this.#state.conversations[id];
    const stored = this.#archive.load(id);
    const conversation = stored ? talk.addMissing(mine, stored) : mine;
    if (conversation !== mine) this.#store.set({ conversations: { ...this.#state.conversations, [id]: conversation } });
    this.#archive.save(conversation);
    this.#store.set({ recents: this.#archive.list() });
  }
}

const placeOf = (conversation, turn) => ({ conversationId: conversation.id, turnId: turn.id, key: turn.answer.key });
