/**
 * Makes the children of one node like those of another, touching only what differs: what is selected, scrolled or
 * focused in the unchanged part stays so, and a long answer costs what its last lines cost.
 */

export function morphChildren(target, source) {
  let old = target.firstChild;
  let fresh = source.firstChild;
  while (fresh !== null) {
    const nextFresh = fresh.nextSibling;
    if (old === null) {
      target.append(fresh);
    } else {
      const nextOld = old.nextSibling;
      if (!old.isEqualNode(fresh)) morphNode(old, fresh);
      old = nextOld;
    }
    fresh = nextFresh;
  }
  while (old !== null) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
}

function morphNode(old, fresh) {
  if (old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
  } else if (old.nodeType === Node.TEXT_NODE) {
    // A growing text keeps its node, and with it the person's selection.
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
  } else {
    morphAttributes(old, fresh);
    morphChildren(old, fresh);
  }
}

function morphAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
}
