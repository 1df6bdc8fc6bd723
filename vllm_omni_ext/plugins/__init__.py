"""The interfaces that a model plugin implements, and the list of installed plugins.

`spec` and `memory` have the data that a plugin declares, `flow` the interface that decides which stages a request uses,
`runtime` and `http` those of the code in an API server.
"""
