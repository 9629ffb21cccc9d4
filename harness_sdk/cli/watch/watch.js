const $ = (id) => document.getElementById(id);
const MAX_ROWS = 300;
const rows = new Map();
let maxEpisodes = 0;
let ages = [];
let clockAhead = 0;
let heardAt = Date.now();
let connected = false;
let browser = null;
let opened = null;

// Texts of episodes reach the page through textContent alone. The server's own SVG is parsed as
// an inert document first; the content security policy lets none of it run either way.
function parsedSvg(text) {
  const found = new DOMParser().parseFromString(text, "text/html").querySelector("svg");
  return document.importNode(found, true);
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Rows are kept by key and moved only where their order changed, so that focus and scroll stay.
function fill(body, list, made) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  list.forEach((item, place) => {
    let row = old.get(item.key);
    old.delete(item.key);
    if (!row) {
      row = element("tr");
      row.dataset.key = item.key;
      row.append(...item.cells.map((cell, column) => made(item, cell, column)));
    } else {
      item.cells.forEach((cell, column) => {
        const holder = row.children[column];
        setText(holder.firstElementChild ?? holder, cell);
        if (holder.title) holder.title = cell;
      });
    }
    row.className = item.mark;
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
  });
  for (const row of old.values()) row.remove();
  $(`no-${body.id}`).hidden = list.length > 0;
}

function cell(_, text) {
  const made = element("td", text);
  if (text.length > 40) made.title = text;
  return made;
}

function episodeCell(item, text, column) {
  if (column !== 1) return cell(item, text);
  const made = element("td");
  const link = element("a", text);
  link.href = `#episode/${item.key}`;
  made.append(link);
  return made;
}

function order(key) {
  const [time, number] = key.split("-").map(Number);
  return [time, number];
}

function newestFirst(a, b) {
  const [one, other] = [order(a.key), order(b.key)];
  return other[0] - one[0] || other[1] - one[1];
}

function takeEpisodes(list) {
  for (const item of list) rows.set(item.key, item);
  const sorted = [...rows.values()].sort(newestFirst);
  for (const item of sorted.slice(maxEpisodes)) rows.delete(item.key);
  showEpisodes();
}

function showEpisodes() {
  const wanted = $("filter").value.toLowerCase();
  const found = [...rows.values()]
    .filter((item) => !wanted || item.cells.join("\n").toLowerCase().includes(wanted))
    .sort(newestFirst);
  fill($("episodes"), found.slice(0, MAX_ROWS), episodeCell);
  const cut = found.length > MAX_ROWS ? `, the newest ${MAX_ROWS} are listed` : "";
  setText($("matches"), wanted || cut ? `${found.length} match${cut}` : "");
}

function facts(holder, list) {
  holder.replaceChildren(
    ...list.map(([name, value]) => {
      const fact = element("div", undefined, "fact");
      fact.append(element("dt", name), element("dd", value));
      return fact;
    }),
  );
}

function showSources(list) {
  $("sources").replaceChildren(
    ...list.map((source) => {
      const text = [source.name, source.address, source.state, source.error].filter(Boolean);
      return element("li", text.join(" · "), source.state);
    }),
  );
}

function showCurves(list) {
  $("curves").replaceChildren(
    ...list.map((curve) => {
      const figure = element("figure");
      const caption = element("figcaption", `${curve.name} `);
      caption.append(element("span", `now ${curve.last}`));
      figure.append(caption, parsedSvg(curve.svg));
      return figure;
    }),
  );
}

const PANES = {
  sources: showSources,
  tiles: (list) => facts($("tiles"), list),
  replicas: (list) => fill($("replicas"), list, cell),
  groups: (list) => fill($("groups"), list, cell),
  steps: (list) => fill($("steps"), list, cell),
  curves: showCurves,
  kept: (text) => setText($("kept"), text),
  ages: (list) => (ages = list),
  now_s: (now) => (clockAhead = now - Date.now() / 1000),
  episodes: takeEpisodes,
};

function age(seconds) {
  const units = [["s", 60], ["min", 60], ["h", 24], ["days", Infinity]];
  let value = Math.max(seconds, 0);
  for (const [unit, size] of units) {
    if (value < size) return `${Math.floor(value)} ${unit}`;
    value /= size;
  }
}

function showLink() {
  const silent = (Date.now() - heardAt) / 1000;
  const lost = !connected || silent > 6;
  const link = $("link");
  link.classList.toggle("lost", lost);
  if (lost) {
    setText(link, `octopus does not answer, for ${age(silent)}; trying again`);
    return;
  }
  const now = Date.now() / 1000 + clockAhead;
  const parts = ages.map(([name, at]) =>
    at === null ? `no ${name} yet` : `last ${name} ${age(now - at)} ago`,
  );
  setText(link, ["live", ...parts].join(" · "));
}

function listen() {
  const events = new EventSource("events");
  events.onmessage = (event) => {
    const news = JSON.parse(event.data);
    heardAt = Date.now();
    connected = true;
    if (news.reset) {
      rows.clear();
      maxEpisodes = news.max_episodes;
      showEpisodes();
    }
    for (const [name, show] of Object.entries(PANES)) if (name in news) show(news[name]);
    showLink();
  };
  events.onerror = () => {
    connected = false;
    showLink();
    // A browser gives up for good where it got an answer that is no stream.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

async function read(path) {
  let response;
  try {
    response = await fetch(path);
  } catch {
    throw new Error("octopus does not answer.");
  }
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

async function openEpisode(key) {
  opened = key;
  browser = null;
  $("run").hidden = true;
  $("episode").hidden = false;
  $("dag").replaceChildren();
  $("detail").hidden = true;
  $("facts").replaceChildren();
  for (const id of ["task", "answer", "failure", "note"]) setText($(id), "");
  $("failure").hidden = $("note").hidden = true;
  setText($("title"), "Reading the episode");
  $("title").focus();
  let found;
  try {
    found = await read(`episodes/${key}`);
  } catch (error) {
    if (opened === key) setText($("title"), error.message);
    return;
  }
  if (opened !== key) return;
  for (const id of ["title", "task", "answer", "failure", "note"]) setText($(id), found[id]);
  $("failure").hidden = !found.failure;
  $("note").hidden = !found.note;
  facts($("facts"), found.facts);
  $("dag").append(parsedSvg(found.svg));
  browser = browseEpisode(found.nodes, $("dag"), $("detail"), (id, begin, end) =>
    read(`episodes/${key}/nodes/${id}?begin=${begin}&end=${end}`),
  );
}

function closeEpisode() {
  const key = opened;
  opened = browser = null;
  $("episode").hidden = true;
  $("run").hidden = false;
  if (key) $("episodes").querySelector(`[data-key="${CSS.escape(key)}"] a`)?.focus();
}

function route() {
  const key = /^#episode\/(\d+-\d+)$/.exec(location.hash)?.[1];
  if (key) openEpisode(key);
  else if (opened) closeEpisode();
}

function step(event) {
  const links = [...$("episodes").querySelectorAll("a")];
  const at = links.indexOf(document.activeElement);
  if (at < 0) return;
  const next = links[at + (event.key === "ArrowDown" ? 1 : -1)];
  next?.focus();
  event.preventDefault();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && opened) {
    if (!browser?.close()) location.hash = "";
  } else if (event.key === "/" && !opened && document.activeElement !== $("filter")) {
    event.preventDefault();
    $("filter").focus();
  } else if (event.key.startsWith("Arrow") && !opened) step(event);
});
$("filter").addEventListener("input", showEpisodes);
$("back").addEventListener("click", () => (location.hash = ""));
addEventListener("hashchange", route);
themeButton($("theme"));
setInterval(showLink, 1000);
listen();
route();
