// Keeps the explorer's page for explorer.js, whose own data change with every choice: so the page is sent once. It comes as
// bytes, behind a line with its name; without bytes it has come before. A run that is interrupted may lose it.

export default function ({ parentElement, data, setTriggerValue }) {
  const end = data.indexOf(10), text = new TextDecoder(), name = text.decode(data.subarray(0, end)), box = parentElement.querySelector("i");
  if (end + 1 < data.length) window.explorerPage = { name, text: text.decode(data.subarray(end + 1)) };
  if (window.explorerPage?.name === name) dispatchEvent(new Event("explorer-page"));
  else if (box.lacking !== name) setTriggerValue("lacking", (box.lacking = name));
}
