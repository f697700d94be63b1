/* Search runs in a web worker, and browsers refuse workers in pages that were opened from a folder.
   There, run the worker's script in a hidden frame instead. */
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    this.ready = new Promise((resolve) => frame.addEventListener("load", resolve, { once: true }));
    const script = "<script>postMessage = parent.postMessage.bind(parent)</" + "script>";
    frame.srcdoc = `${script}<script src="${new URL(url, location.href)}"></` + "script>";
    document.body.append(frame);
    this.frame = frame;
    addEventListener("message", (event) => {
      if (event.source !== frame.contentWindow) return;
      this.dispatchEvent(new MessageEvent("message", { data: event.data }));
    });
  }

  async postMessage(data) {
    await this.ready;
    const event = new this.frame.contentWindow.MessageEvent("message", { data });
    this.frame.contentWindow.dispatchEvent(event);
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
