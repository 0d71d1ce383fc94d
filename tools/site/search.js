// The search box: sections that have every word, those first whose heading has them.
const box = document.getElementById("search");
const found = document.getElementById("found");
const root = document.body.dataset.root;
let index = null;

// The index is as large as all pages, so it is read at the first use.
function load() {
  index ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = root + "/index.js";
    script.onload = () => resolve(sections);
    document.head.append(script);
  });
  return index;
}

function score(section, words) {
  const [page, , title, text] = section.map((part) => part.toLowerCase());
  if (!words.every((word) => (page + " " + title + " " + text).includes(word))) return 0;
  return 1 + words.reduce((sum, word) => sum + (title === word ? 100 : title.includes(word) ? 10 : 0), 0);
}

async function search() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = words.length ? await load() : [];
  const best = all
    .map((section) => [score(section, words), section])
    .filter(([points]) => points > 0)
    .sort(([a], [b]) => b - a)
    .slice(0, 20);
  found.replaceChildren(
    ...best.map(([, [page, anchor, title, text]]) => {
      const item = document.createElement("li");
      const link = document.createElement("a");
      link.href = root + "/" + page + (anchor ? "#" + anchor : "");
      link.textContent = title;
      const place = document.createElement("small");
      const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 60);
      place.textContent = page + ": " + text.slice(at, at + 160);
      item.append(link, place);
      return item;
    }),
  );
  found.hidden = !words.length;
  if (words.length && !best.length) found.textContent = "Nothing has all of these words.";
}

box.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== box) {
    event.preventDefault();
    box.focus();
  }
  if (event.key === "Escape") {
    box.value = "";
    search();
  }
});
