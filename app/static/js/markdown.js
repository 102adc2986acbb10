/**
 * Markdown of a model's answer as DOM nodes that cannot run, load or post anything.
 *
 * Two locks: markdown-it shows raw HTML as text and takes only known kinds of links, and DOMPurify passes a short list of
 * elements. The whole text is parsed and sanitised at each call, so a tag split over two deltas is seen whole.
 */

import MarkdownIt from "../vendor/markdown-it.js";
import DOMPurify from "../vendor/purify.js";

const LINK = /^(?:https?:|mailto:)/i;

const ELEMENTS = [
  ...["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s"],
  ...["strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
];

const SANITIZE = {
  ALLOWED_TAGS: ELEMENTS,
  ALLOWED_ATTR: ["class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: LINK,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const CLASS = /^(?:language-[\w+#.-]{1,40}|align-(?:left|center|right))$/;

const parser = makeParser();
const purify = withHooks(DOMPurify);

/** A fragment with the rendered text. */
export function renderMarkdown(text) {
  const fragment = purify.sanitize(parser.render(text), SANITIZE);
  for (const table of fragment.querySelectorAll("table")) wrap(table, "div", "table-box");
  for (const pre of fragment.querySelectorAll("pre")) addCodeHead(pre);
  return fragment;
}

function makeParser() {
  const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
  markdown.validateLink = (url) => LINK.test(url.trim());
  // A line of dashes below a line of text is a heading in Markdown; while a list is arriving, that would flash.
  markdown.disable("lheading");
  // An image would tell a foreign server who reads what: a link leaves that to the person.
  markdown.renderer.rules.image = (tokens, index) => {
    const { escapeHtml } = markdown.utils;
    const label = tokens[index].content || "image";
    return `<a href="${escapeHtml(tokens[index].attrGet("src") ?? "")}">${escapeHtml(label)}</a>`;
  };
  for (const cell of ["td_open", "th_open"]) {
    markdown.renderer.rules[cell] = (tokens, index, options, _env, renderer) => {
      // markdown-it aligns by a style attribute, which the page's policy forbids.
      const token = tokens[index];
      const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "");
      token.attrs = align ? [["class", `align-${align[1]}`]] : null;
      return renderer.renderToken(tokens, index, options);
    };
  }
  return markdown;
}

function withHooks(purifier) {
  purifier.addHook("uponSanitizeAttribute", (_node, attribute) => {
    if (attribute.attrName === "class" && !CLASS.test(attribute.attrValue)) attribute.keepAttr = false;
  });
  purifier.addHook("afterSanitizeAttributes", (node) => {
    if (node.nodeName !== "A") return;
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  });
  return purifier;
}

/** The language's name and a copy button above a block of code. Made here, after the sanitiser: a model cannot. */
function addCodeHead(pre) {
  const language = /language-(\S+)/.exec(pre.firstElementChild?.className ?? "");
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = language ? language[1] : "code";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy-code";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy code");
  head.append(name, copy);
  pre.tabIndex = 0; // a keyboard can then scroll long lines
  wrap(pre, "div", "code-box").prepend(head);
}

function wrap(node, tag, className) {
  const box = document.createElement(tag);
  box.className = className;
  node.replaceWith(box);
  box.append(node);
  return box;
}
