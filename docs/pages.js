// Store the head of its column in each cell. On a phone, style.css shows it before the cell.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  for (const cell of table.querySelectorAll("tbody td")) {
    if (heads[cell.cellIndex]) cell.dataset.head = `${heads[cell.cellIndex]}: `;
  }
}

// Browsers break a line after a hyphen. In code, style.css keeps words with hyphens, such as --settings, on one line.
for (const code of document.querySelectorAll(".language-bash code, :not(pre) > code:not(:has(*))")) {
  code.innerHTML = code.innerHTML.replace(/(?<![^\s>])[\w./-]*-[\w./-]+/g, '<span class="whole">$&</span>');
}
