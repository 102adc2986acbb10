/** The few HTTP calls that the page makes beside its socket. */

/** An answer of the server that is not 2xx, or none at all (status 0). */
export class ApiProblem extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const KEY = "trunkline.key";

/** What a header can carry; any other text is no key. */
const PRINTABLE = /^[\x21-\x7e]+$/;

export class Api {
  #storage;
  #key;

  /** `storage` keeps the key for this tab (sessionStorage), or is null: then it is asked for at each load. */
  constructor(storage) {
    this.#storage = storage;
    this.#key = storage?.getItem(KEY) ?? null;
  }

  get hasKey() {
    return this.#key !== null;
  }

  /** Sent with every call from now on; null for none. */
  useKey(key) {
    this.#key = key;
    if (key === null) this.#storage?.removeItem(KEY);
    else this.#storage?.setItem(KEY, key);
  }

  /** Ids of the models, `<model>` and `<model>:<assistant>`, as GET /v1/models lists them. */
  async fetchModels() {
    const list = await this.#call("GET", "/v1/models");
    return list.data.map((model) => ({ id: model.id, description: model.description ?? null }));
  }

  /** The stored response object. */
  fetchResponse(id) {
    return this.#call("GET", `/v1/responses/${encodeURIComponent(id)}`);
  }

  /** Stops a running response where no socket is open to say so. */
  cancelResponse(id) {
    return this.#call("POST", `/v1/responses/${encodeURIComponent(id)}/cancel`);
  }

  /** What a new socket says of who opens it: a ticket, which is for one socket; nothing where no key is asked for. */
  async socketProtocols() {
    if (!this.hasKey) return [];
    const { subprotocol, ticket } = await this.#call("POST", "/v1/tickets");
    return [subprotocol, ticket];
  }

  async #call(method, path) {
    const headers = { Accept: "application/json" };
    if (this.#key !== null) {
      if (!PRINTABLE.test(this.#key)) throw new ApiProblem(401, "This is not a key.", "invalid_api_key");
      headers.Authorization = `Bearer ${this.#key}`;
    }
    let reply;
    try {
      reply = await fetch(path, { method, headers });
    } catch {
      throw new ApiProblem(0, "The server cannot be reached.");
    }
    const body = await reply.json().catch(() => null);
    if (reply.ok && body !== null) return body;
    throw new ApiProblem(reply.status, body?.error?.message ?? `The server answered ${reply.status}.`, body?.error?.code);
  }
}
