{{- define "octavo.name" -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- define "octavo.selector" -}}
app.kubernetes.io/name: octavo
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "octavo.labels" -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
{{- define "octavo.isScaled" -}}
{{- if and .Values.hpa.enabled .Values.keda.enabled -}}{{ fail "enable hpa or keda, not both" }}{{- end -}}
{{- if or .Values.hpa.enabled .Values.keda.enabled -}}true{{- end -}}
{{- end -}}
