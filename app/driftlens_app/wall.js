// Cards of samples, each with its picture or text and what every model says of it; a click tells the server which one.

const GOOD = ["right", "repaired"];

export default function ({ parentElement, data, setStateValue }) {
  const made = (kind, name, text) => {
    const element = document.createElement(kind);
    element.className = name;
    element.textContent = text; // never as HTML: names and texts come from anybody
    return element;
  };
  const cardOf = (card) => {
    const button = made("button", "card", "");
    button.type = "button";
    button.dataset.sample = card.id;
    if (card.picture) {
      const picture = made("img", "", "");
      picture.src = card.picture;
      picture.alt = "";
      button.append(picture);
    }
    if (card.text) button.append(made("span", "text", card.text));
    if (card.outcome) button.append(made("span", `outcome ${GOOD.includes(card.outcome) ? "good" : "bad"}`, card.outcome));
    const list = made("span", "says", "");
    for (const [who, what, mark] of card.says) {
      const look = mark === "✓" ? "good" : mark ? "other bad" : "same";
      list.append(made("span", "who", who), made("span", look, mark ? `${what}\u00a0${mark}` : what));
    }
    button.append(list, made("span", "id", card.id));
    const said = card.says.map(([who, what]) => `${who} ${what}`).join(", ");
    button.setAttribute("aria-label", [`Sample ${card.id}`, card.outcome, said].filter(Boolean).join(": "));
    button.onclick = () => setStateValue("sample", card.id);
    return button;
  };
  parentElement.querySelector(".walls").replaceChildren(...data.walls.map(({ title, cards }) => {
    const wall = made("div", cards.some((card) => card.text) ? "wall texts" : "wall", "");
    if (title) wall.append(made("h4", "", title));
    wall.append(...cards.map(cardOf));
    return wall;
  }));
}
