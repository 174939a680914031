// Brings the explorer's page to explorer.js, whose own data change with every choice: so it is sent once.

export default function ({ data }) {
  (window.explorerPages ??= {})[data.show] = [data.name, data.page];
  dispatchEvent(new Event("explorer-page"));
}
