// Names in tables may be broken after an underscore, and each cell knows the head of its column, for phones.
document.querySelectorAll(".md-typeset table:not([class])").forEach((table) => {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
  table.querySelectorAll("tbody tr").forEach((row) => {
    [...row.cells].forEach((cell, column) => { cell.dataset.label = heads[column] ?? ""; });
  });
  table.querySelectorAll("code").forEach((code) => {
    const parts = code.textContent.split(/(?<=\w[_=(/])(?=\w)/);
    code.replaceChildren(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
  });
});
