// What happens without a click: nothing in a page is ever run, and pages in view follow the store.
"use strict";
(() => {
  const refuse = function () { throw new Error("scripts in attributes are off"); };
  htmx.registerExtension("coatcheck", { init: (api) => api.initSecurity(null, refuse, refuse) });

  const follow = () => {
    const live = document.querySelector("[data-live]");
    const notice = document.querySelector("[data-live-notice]");
    if (!live && !notice) return;
    const events = new EventSource(`/console/events?since=${(live || notice).dataset.since}`);
    events.addEventListener("changed", () => {
      if (notice) notice.hidden = false;
      if (live) htmx.ajax("GET", live.dataset.live, { target: "#live", swap: "outerHTML" });
    });
    window.addEventListener("pagehide", () => events.close());
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", follow); else follow();
})();
