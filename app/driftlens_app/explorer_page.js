// Brings the explorer's page to explorer.js, whose own data change with every choice: so it is sent once. It comes as
// bytes, behind a line of JSON that says what it is.

export default function ({ data }) {
  const end = data.indexOf(10), text = new TextDecoder(), [show, name] = JSON.parse(text.decode(data.subarray(0, end)));
  (window.explorerPages ??= {})[show] = [name, text.decode(data.subarray(end + 1))];
  dispatchEvent(new Event("explorer-page"));
}
