/** The page's icons: strokes on a grid of 24, in the colour of the text. Decoration only, so hidden from readers. */

import { html } from "../html.js";

const PATHS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  again: "M20 11a8 8 0 1 0-2.3 6.2M20 5v6h-6",
  left: "M14.5 6L8.5 12l6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2.5M12 19.5V22M2 12h2.5M19.5 12H22M5 5l1.7 1.7M17.3 17.3L19 19M19 5l-1.7 1.7M6.7 17.3L5 19",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  support: "M5 13a7 7 0 0 1 14 0M5 13v4h3v-5H5M19 13v4h-3v-5h3M19 17a5 4 0 0 1-5 3h-1",
  writing: "M4 20l4-1L19.5 7.5a2.1 2.1 0 0 0-3-3L5 16l-1 4zM14.5 6.5l3 3",
  translator: "M4 6h9M8.5 4v2M11 6c-.6 3.600-3 6.500-6.500 8M6 9c1.200 2.400 3.200 4 5.500 5M12.500 20l4-10 4 10M14 17h5",
  model: "M7 7h10v10H7zM10 3v4M14 3v4M10 17v4M14 17v4M3 10h4M3 14h4M17 10h4M17 14h4",
};

export function Icon({ name, size = 18 }) {
  return html`<svg class="icon" width=${size} height=${size} viewBox="0 0 24 24" aria-hidden="true" focusable="false">
    <path d=${PATHS[name] ?? PATHS.model} />
  </svg>`;
}

/** The trunk that splits into branches. */
export function Mark({ size = 26 }) {
  return html`<svg class="mark" width=${size} height=${size} viewBox="0 0 32 32" aria-hidden="true" focusable="false">
    <path d="M4 16h8M12 16c5 0 4-8 9-8h6M12 16h15M12 16c5 0 4 8 9 8h6" />
  </svg>`;
}

export const StopIcon = () => html`<span class="stop-square" aria-hidden="true"></span>`;
