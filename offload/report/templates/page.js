"use strict";
// Values under the pointer or, by arrow keys, at the cursor. Without this script the page shows everything else.
for (const plot of document.querySelectorAll(".plot")) {
  const frame = plot.querySelector(".frame"), readout = plot.querySelector(".readout"), cursor = plot.querySelector(".cursor");
  let data = null, place = -1;

  const read = () => {
    if (data === null) {
      data = JSON.parse(plot.querySelector("script[type='application/json']").textContent);
      // The cursor visits the places of all lines.
      data.places = [...new Set(data.grids.flatMap((grid) => grid.at.filter((at) => at !== null)))].sort((a, b) => a - b);
    }
    return data;
  };
  const nearest = (places, at) => {
    let best = -1;
    places.forEach((each, number) => {
      if (each !== null && (best < 0 || Math.abs(each - at) < Math.abs(places[best] - at))) best = number;
    });
    return best;
  };
  const hide = () => { readout.hidden = cursor.hidden = true; place = -1; };
  const show = (at) => {
    const found = read(), first = found.grids.length ? nearest(found.grids[0].at, at) : -1;
    if (first < 0) return;
    readout.textContent = "";
    const head = document.createElement("b");
    head.textContent = found.grids[0].text[first];
    readout.append(head);
    for (const line of found.lines) {
      const where = nearest(found.grids[line.grid].at, at);
      if (where < 0 || !line.y[where]) continue;
      const row = document.createElement("span"), dot = document.createElement("i");
      dot.className = line.role;
      row.append(dot, `${line.name}: ${line.y[where]}`);
      readout.append(row);
    }
    const left = 100 * found.grids[0].at[first];
    cursor.style.left = `${left}%`;
    readout.style.left = left < 50 ? `calc(${left}% + .6rem)` : "auto";
    readout.style.right = left < 50 ? "auto" : `calc(${100 - left}% + .6rem)`;
    readout.hidden = cursor.hidden = false;
  };
  frame.addEventListener("pointermove", (event) => {
    const box = frame.getBoundingClientRect();
    show((event.clientX - box.left) / box.width);
  });
  frame.addEventListener("pointerleave", hide);
  frame.addEventListener("blur", hide);
  frame.addEventListener("keydown", (event) => {
    const places = read().places, last = places.length - 1;
    const page = Math.max(1, Math.round(places.length / 10));
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: page, PageUp: -page, Home: -places.length, End: places.length };
    if (event.key === "Escape") hide();
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    place = place < 0 && moves[event.key] < 0 ? last : Math.min(Math.max(place + moves[event.key], 0), last);
    show(places[place]);
  });
}
// Escape closes the explanation of a mark.
for (const mark of document.querySelectorAll(".mark")) {
  mark.addEventListener("keydown", (event) => { if (event.key === "Escape") mark.classList.add("closed"); });
  for (const kind of ["blur", "pointerenter", "click"]) mark.addEventListener(kind, () => mark.classList.remove("closed"));
}
