// Cards of samples, each with its picture or text and what every model says of it; a click tells the server which one.

export default function ({ parentElement, data, setStateValue }) {
  const wall = parentElement.querySelector(".wall");
  const made = (kind, name, text) => {
    const element = document.createElement(kind);
    element.className = name;
    element.textContent = text; // never as HTML: names and texts come from anybody
    return element;
  };
  wall.classList.toggle("texts", data.cards.some((card) => card.text));
  wall.replaceChildren(...data.cards.map((card) => {
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
    const list = made("span", "says", "");
    for (const [who, what, isOther] of card.says) {
      list.append(made("span", "who", who), made("span", isOther ? "other" : "same", isOther ? `${what}\u00a0\u2260` : what));
    }
    button.append(list, made("span", "id", card.id));
    button.setAttribute("aria-label", `Sample ${card.id}: ${card.says.map(([who, what]) => `${who} ${what}`).join(", ")}`);
    button.onclick = () => setStateValue("sample", card.id);
    return button;
  }));
}
