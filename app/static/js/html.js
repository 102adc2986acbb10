/** Preact with templates in place of JSX, so that the page needs no build step. */

import { h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { Component, Fragment } from "../vendor/preact.js";
export { render };

export const html = htm.bind(h);
