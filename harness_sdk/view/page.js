const nodes = JSON.parse(document.getElementById("episode").textContent).nodes;
const byId = new Map(nodes.map((node) => [node.id, node]));
const part = (list, begin, end) => list && list.slice(begin, end);
const browser = browseEpisode(
  nodes,
  document.getElementById("dag"),
  document.getElementById("detail"),
  (id, begin, end) => {
    const { ids, text, logprobs, shades } = byId.get(id);
    return {
      ids: part(ids, begin, end),
      text: part(text, begin, end),
      logprobs: part(logprobs, begin, end),
      shades: part(shades, begin, end),
    };
  },
);
document.addEventListener("keydown", (event) => event.key === "Escape" && browser.close());
themeButton(document.getElementById("theme"));
