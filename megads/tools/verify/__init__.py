"""Does a layout train the same model? A small copy of it against one process of plain torch."""
