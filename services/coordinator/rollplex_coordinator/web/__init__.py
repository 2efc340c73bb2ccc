"""The dashboard: plain HTML, CSS and ES modules, served as they lie here (`http.pages`). No build step.

index.html   the frame: login, views, places
css/         colours and layout, light and dark
js/          main (start, routes), api (token, requests, the event stream), and a module for each thing that is shown
vendor/      uPlot, unchanged, with its licence and where it is from
"""
