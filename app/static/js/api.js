/** The few HTTP calls that the page makes beside its socket. */

/** An answer of the server that is not 2xx, or none at all (status 0). */
export class ApiProblem extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Ids of the models, `<model>` and `<model>:<assistant>`, as GET /v1/models lists them. */
export async function fetchModels() {
  const list = await call("GET", "/v1/models");
  return list.data.map((model) => ({ id: model.id, description: model.description ?? null }));
}

/** The stored response object. */
export const fetchResponse = (id) => call("GET", `/v1/responses/${encodeURIComponent(id)}`);

/** Stops a running response where no socket is open to say so. */
export const cancelResponse = (id) => call("POST", `/v1/responses/${encodeURIComponent(id)}/cancel`);

async function call(method, path) {
  let reply;
  try {
    reply = await fetch(path, { method, headers: { Accept: "application/json" } });
  } catch {
    throw new ApiProblem(0, "The server cannot be reached.");
  }
  const body = await reply.json().catch(() => null);
  if (reply.ok && body !== null) return body;
  if (reply.status === 401) {
    throw new ApiProblem(reply.status, "This server asks for a key, and the page has none. Open it where it runs without tenants.");
  }
  throw new ApiProblem(reply.status, body?.error?.message ?? `The server answered ${reply.status}.`, body?.error?.code);
}
