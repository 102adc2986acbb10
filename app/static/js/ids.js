/** Ids made by the page: for conversations, turns and the lanes of the socket. */

const ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz";

/** `prefix` and 14 random characters (72 bits). crypto.randomUUID would not exist on plain http in a local network. */
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(14));
  return prefix + Array.from(bytes, (byte) => ALPHABET[byte % ALPHABET.length]).join("");
}
