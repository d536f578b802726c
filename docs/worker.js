// A browser starts no worker from a file: on pages that are opened from a folder the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      window.addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow) return;
        const heard = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(heard);
        if (this.onmessage) this.onmessage(heard);
      });
      const inside = frame.contentWindow;
      // Defined within, so that what is heard says that it comes from there.
      inside.eval("self.postMessage = (data) => parent.postMessage(data, '*')");
      const script = inside.document.createElement("script");
      this.ready = new Promise((done) => (script.onload = done));
      script.src = address;
      inside.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
