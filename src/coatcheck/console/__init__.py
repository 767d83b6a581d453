"""Pages for a person who looks at a store: sessions, conversations, artifacts and savings. `site`
is the entry; `coatcheck console` and `coatcheck serve` run it."""
