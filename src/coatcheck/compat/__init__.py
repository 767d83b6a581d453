"""Drop-ins for four published designs. Each module has the design's names and shapes, over
Coatcheck's store."""
