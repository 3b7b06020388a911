"""Reports as HTML: the blocks of a page, charts, and the page of a study."""
