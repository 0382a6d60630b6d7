/* Long names in code, such as policies, may be broken after a separator, so that they are never broken in mid-word.
   A break opportunity is not copied with the text. */
(function () {
  "use strict";

  /* The pieces of a name that stay whole: an option and its value, a number, a budget. */
  function pieces(text) {
    return text.split(/(?<=[+/:,(])(?=[^+/:,()])|(?<=\.)(?=[A-Za-z])/).filter((piece) => piece !== "");
  }

  function allowBreaks(code) {
    const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    texts.forEach((text) => {
      const parts = pieces(text.data).flatMap((piece) => [piece, document.createElement("wbr")]);
      parts.pop(); // after the last piece the text may be broken or not, as before
      text.replaceWith(...parts);
    });
  }

  if (typeof window !== "undefined") window.allowBreaks = allowBreaks; // for tables that are made later, by board.js
  if (typeof document !== "undefined") {
    document.addEventListener("DOMContentLoaded", () => {
      document.querySelectorAll(".md-typeset :not(pre) > code").forEach(allowBreaks);
    });
  }
  if (typeof module !== "undefined") module.exports = { pieces };
})();
