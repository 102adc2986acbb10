/**
 * A conversation: a tree of turns, of which one path is shown. Pure functions; none changes what it is given.
 *
 * turn     { id, parent (turn id, ROOT for a first one), prompt, answer }
 * chosen   parent id -> the child that is shown; regenerating makes a second child of the same parent
 */

import { isRunning, isUsable, newAnswer } from "./answer.js";
import { newId } from "./ids.js";

export const ROOT = "";
export const MAX_TURNS = 500;
const MAX_TITLE_LENGTH = 60;

export function newConversation(model, now) {
  return { id: newId("c"), model, title: "", updatedAt: now, turns: {}, chosen: {} };
}

/** The turns that are shown, first to last. */
export function pathOf(conversation) {
  const path = [];
  let id = conversation.chosen[ROOT];
  while (id !== undefined && conversation.turns[id]) {
    path.push(conversation.turns[id]);
    id = conversation.chosen[id];
  }
  return path;
}

/** All children of the turn's parent, oldest first; the turn itself is one of them. */
export function siblingsOf(conversation, turn) {
  return Object.values(conversation.turns).filter((other) => other.parent === turn.parent);
}

/** Adds a turn under `parent` and shows it. Throws a RangeError when the conversation is full. */
export function addTurn(conversation, parent, prompt, now) {
  if (Object.keys(conversation.turns).length >= MAX_TURNS) {
    throw new RangeError(`A chat holds ${MAX_TURNS} answers. Please start a new one.`);
  }
  const turn = { id: newId("t"), parent, prompt, answer: newAnswer(newId("a"), now) };
  const next = {
    ...conversation,
    title: conversation.title || titleOf(prompt),
    updatedAt: now,
    turns: { ...conversation.turns, [turn.id]: turn },
    chosen: { ...conversation.chosen, [parent]: turn.id },
  };
  return [next, turn];
}

export function chooseTurn(conversation, turn) {
  return { ...conversation, chosen: { ...conversation.chosen, [turn.parent]: turn.id } };
}

export function withAnswer(conversation, turnId, answer) {
  const turn = conversation.turns[turnId];
  return { ...conversation, turns: { ...conversation.turns, [turnId]: { ...turn, answer } } };
}

/** The response that a turn goes on from: its nearest ancestor that has one, or null at the root. */
export function parentResponseOf(conversation, turn) {
  for (let parent = conversation.turns[turn.parent]; parent; parent = conversation.turns[parent.parent]) {
    if (isUsable(parent.answer)) return parent.answer.responseId;
  }
  return null;
}

export const runningTurnsOf = (conversation) => Object.values(conversation.turns).filter((turn) => isRunning(turn.answer));

/** `mine`, and the turns that another tab has added to its copy of the same conversation. */
export function addMissing(mine, stored) {
  const missing = Object.values(stored.turns).filter((turn) => !mine.turns[turn.id]);
  if (missing.length === 0) return mine;
  const turns = { ...mine.turns };
  for (const turn of missing) turns[turn.id] = turn;
  return { ...mine, turns, chosen: { ...stored.chosen, ...mine.chosen } };
}

/** What another tab has just stored, but for the turns that `isOurs`: those this tab knows better. */
export function takeOver(mine, stored, isOurs) {
  const ours = Object.values(mine.turns).filter(isOurs);
  return { ...stored, turns: { ...stored.turns, ...Object.fromEntries(ours.map((turn) => [turn.id, turn])) } };
}

function titleOf(prompt) {
  const line = prompt.trim().replace(/\s+/g, " ");
  return line.length > MAX_TITLE_LENGTH ? `${line.slice(0, MAX_TITLE_LENGTH - 1)}…` : line;
}
