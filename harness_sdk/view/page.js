"use strict";
const nodes = new Map(
  JSON.parse(document.getElementById("episode").textContent).nodes.map((n) => [n.id, n]),
);
const shapes = new Map(
  [...document.querySelectorAll(".node")].map((g) => [Number(g.dataset.node), g]),
);
const detail = document.getElementById("detail");
const children = new Map();
for (const node of nodes.values()) {
  children.set(node.parent, [...(children.get(node.parent) ?? []), node.id]);
}
let pinned = null;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function tokenSpan(node, index) {
  const shown = node.text ? node.text[index] : String(node.ids[index]);
  const span = element("span", shown);
  const logprob = node.logprobs[index];
  let tip = `token ${node.ids[index]}, position ${node.position + index}`;
  if (logprob !== null) {
    tip += `, log-probability ${logprob.toFixed(4)} (p = ${Math.exp(logprob).toPrecision(3)})`;
    const shade = node.shades[index] ?? 0;
    span.className = "sampled";
    span.style.background = `rgba(var(--wild),${(0.55 * shade).toFixed(3)})`;
  }
  span.title = tip;
  return span;
}

function show(id) {
  const node = nodes.get(id);
  if (!node) return;
  for (const [other, shape] of shapes) shape.classList.toggle("on", other === id);
  const heading = element("h2", `${node.kind} of ${node.thread}, step ${node.step}`);
  const facts = [
    `node ${node.id}`,
    `${node.ids.length} tokens`,
    `positions ${node.position} to ${node.position + node.ids.length - 1}`,
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
      const link = element("button", `node ${source} [${begin}, ${end}) of ${name}`);
      link.type = "button";
      link.addEventListener("click", () => pin(source));
      row.append(link);
    }
    parts.push(row);
  }
  const tokens = element("p", undefined, node.text ? "tokens" : "tokens ids");
  tokens.append(...node.ids.map((_, index) => tokenSpan(node, index)));
  parts.push(tokens);
  detail.replaceChildren(...parts);
  detail.hidden = false;
}

function pin(id) {
  pinned = id;
  const shape = shapes.get(id);
  shape?.focus({ preventScroll: true });
  shape?.scrollIntoView({ block: "nearest", inline: "nearest" });
  show(id);
}

function close() {
  pinned = null;
  detail.hidden = true;
  for (const shape of shapes.values()) shape.classList.remove("on");
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
document.addEventListener("keydown", (event) => event.key === "Escape" && close());
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
