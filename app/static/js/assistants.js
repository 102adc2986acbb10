/** Assistants as the page names them: from the ids in GET /v1/models, `<model>:<assistant>` or a model alone. */

const SHOWN = {
  support: {
    name: "Support desk",
    line: "Orders, deliveries, returns and refunds of a small shop.",
    examples: ["My parcel has not moved for a week. What now?", "How do I send a lamp back?", "Can I still change my order?"],
  },
  writing: {
    name: "Writing coach",
    line: "Looks at a draft and says what would help it most.",
    examples: [
      "Give me three openings for a speech at my sister's wedding.",
      "Make this shorter: I am writing to you in order to inform you that we have decided to wait.",
      "How do I begin a job application?",
    ],
  },
  translator: {
    name: "Translator",
    line: "Carries a text into another language, tone and all.",
    examples: [
      "Into German: The train was late, so we missed the first act.",
      "Into French: Could you send me the invoice by Friday?",
      "What does \"Das ist mir Wurst\" mean?",
    ],
  },
};

/** The assistant's id, or null where the entry is a model alone. */
export function assistantOf(model) {
  const colon = model.lastIndexOf(":");
  return colon === -1 ? null : model.slice(colon + 1);
}

export function baseModelOf(model) {
  const colon = model.lastIndexOf(":");
  return colon === -1 ? model : model.slice(0, colon);
}

/** { name, line, examples } for a model id; ids that the page does not know get a name made of the id. */
export function shownOf(model, description = null) {
  const assistant = assistantOf(model);
  if (assistant === null) return { name: "No assistant", line: description ?? "The model alone, without a system prompt.", examples: [] };
  const known = SHOWN[assistant];
  const name = assistant.charAt(0).toUpperCase() + assistant.slice(1).replace(/[-_]+/g, " ");
  if (!known) return { name, line: description ?? "An assistant of this server.", examples: [] };
  return { ...known, line: description ?? known.line };
}
