"use strict";
const TOKENS_AT_ONCE = 2000;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function button(text, onClick) {
  const made = element("button", text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

function themeButton(made) {
  made.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}

function tokenSpan(node, tokens, index, begin) {
  const span = element("span", tokens.text ? tokens.text[index] : String(tokens.ids[index]));
  const logprob = tokens.logprobs[index];
  let tip = `token ${tokens.ids[index]}, position ${node.position + begin + index}`;
  if (logprob !== null) {
    tip += `, log-probability ${logprob.toFixed(4)} (p = ${Math.exp(logprob).toPrecision(3)})`;
    const shade = tokens.shades[index] ?? 0;
    span.className = "sampled";
    span.style.background = `rgba(var(--wild),${(0.55 * shade).toFixed(3)})`;
  }
  span.title = tip;
  return span;
}

// Makes the shapes of an episode's SVG in `dag` show their nodes in `detail`; `read(id, begin, end)`
// gives, or promises, the node's tokens [begin, end) as {ids, text, logprobs, shades}.
function browseEpisode(list, dag, detail, read) {
  const nodes = new Map(list.map((node) => [node.id, node]));
  const shapes = new Map(
    [...dag.querySelectorAll(".node")].map((shape) => [Number(shape.dataset.node), shape]),
  );
  const children = new Map();
  for (const node of list) {
    children.set(node.parent, [...(children.get(node.parent) ?? []), node.id]);
  }
  let pinned = null;
  let shown = null;

  async function appendTokens(node, tokens, more, begin) {
    const end = Math.min(begin + TOKENS_AT_ONCE, node.count);
    let found;
    try {
      found = await read(node.id, begin, end);
    } catch (error) {
      more.replaceChildren(`${error.message} `, button("Try again", () => next(begin)));
      return;
    }
    if (shown !== node.id) return;
    tokens.classList.toggle("ids", !found.text);
    tokens.append(...found.ids.map((_, index) => tokenSpan(node, found, index, begin)));
    more.replaceChildren();
    if (end < node.count) {
      const label = `Next ${Math.min(TOKENS_AT_ONCE, node.count - end)} tokens`;
      more.append(button(label, () => next(end)), `${end} of ${node.count} shown`);
    }
    function next(at) {
      more.replaceChildren("reading");
      appendTokens(node, tokens, more, at);
    }
  }

  function show(id) {
    const node = nodes.get(id);
    if (!node || shown === id) return;
    shown = id;
    for (const [other, shape] of shapes) shape.classList.toggle("on", other === id);
    const heading = element("h2", `${node.kind} of ${node.thread}, step ${node.step}`);
    const facts = [
      `node ${node.id}`,
      `${node.count} tokens`,
      `positions ${node.position} to ${node.position + node.count - 1}`,
      `policy version ${node.version}`,
      `temperature ${node.temperature}`,
    ];
    if (node.rewound) facts.push("rewound");
    const parts = [heading, element("p", facts.join(" · "), "meta")];
    if (node.mounts.length) {
      const row = element("div", "sees ");
      for (const [source, begin, end] of node.mounts) {
        const from = nodes.get(source);
        const name = from ? `${from.thread}, step ${from.step}` : "?";
        row.append(button(`node ${source} [${begin}, ${end}) of ${name}`, () => pin(source)));
      }
      parts.push(row);
    }
    const tokens = element("p", undefined, "tokens");
    const more = element("p", undefined, "meta");
    detail.replaceChildren(...parts, tokens, more);
    detail.hidden = false;
    appendTokens(node, tokens, more, 0);
  }

  function pin(id) {
    pinned = id;
    const shape = shapes.get(id);
    shape?.focus({ preventScroll: true });
    shape?.scrollIntoView({ block: "nearest", inline: "nearest" });
    show(id);
  }

  function close() {
    const wasOpen = !detail.hidden;
    pinned = shown = null;
    detail.hidden = true;
    for (const shape of shapes.values()) shape.classList.remove("on");
    return wasOpen;
  }

  function neighbour(id, key) {
    const node = nodes.get(id);
    if (key === "ArrowLeft") return node.parent;
    if (key === "ArrowRight") return (children.get(id) ?? [])[0];
    // Up and down: the next branch among the nearest ancestor's that has several.
    let below = node;
    for (;;) {
      const row = children.get(below.parent) ?? [];
      const at = row.indexOf(below.id) + (key === "ArrowDown" ? 1 : -1);
      if (row[at] !== undefined) return row[at];
      below = nodes.get(below.parent);
      if (!below) return undefined;
    }
  }

  for (const [id, shape] of shapes) {
    shape.addEventListener("click", () => pin(id));
    shape.addEventListener("mouseenter", () => pinned === null && show(id));
    shape.addEventListener("focus", () => pinned === null && show(id));
    shape.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") pin(id);
      else if (event.key.startsWith("Arrow")) {
        const next = neighbour(id, event.key);
        if (nodes.has(next)) pin(next);
      } else return;
      event.preventDefault();
    });
  }
  return { pin, close };
}
