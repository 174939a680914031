// Browsers start no worker for a page that was opened from a folder. There the search's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.document.open();
      inner.document.write("<body>");
      inner.document.close();
      const load = (src) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          Object.assign(script, { src, onload: resolve, onerror: reject });
          inner.document.body.append(script);
        });
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...urls) =>
        urls.reduce((before, src) => before.then(() => load(src)), Promise.resolve());
      const ready = load(url);
      this.postMessage = (data) =>
        ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
  };
}
