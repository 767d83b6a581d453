"""The store over HTTP, for programs in any language. `application` is the entry; `coatcheck serve`
runs it."""
